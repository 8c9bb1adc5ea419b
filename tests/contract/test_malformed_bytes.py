"""Bytes that are no message, to every method of every service: INVALID_ARGUMENT, and the server lives on.

`malformed_calls` works on any server: it finds the methods in the service descriptors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.buffer.v1 import buffer_pb2
from services.buffer.store.memory import MemoryStore
from tests.support.buffer_server import served_buffer

BUFFER = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"]

# A number that is cut; a length beyond the end; a group that never ends; text.
# (Field number 0 is not among them: protobuf itself lets it pass in a message without fields.)
MALFORMED = [b"\x08\x80", b"\x0a\x7fabc", b"\x0b\x0b\x0b", b"GET / HTTP/1.1\r\n\r\n"]


def methods(*services: ServiceDescriptor) -> Iterator[MethodDescriptor]:
    """Every method of the services."""
    for service in services:
        yield from service.methods


async def call_raw(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> grpc.StatusCode:
    """Sends the bytes as they are; the status of the answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            async for _ in channel.unary_stream(path)(data, timeout=10):
                pass
        else:
            await channel.unary_unary(path)(data, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with served_buffer(MemoryStore()) as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.mark.parametrize("method", methods(BUFFER), ids=lambda m: m.name)
async def test_malformed_bytes_are_an_invalid_argument_and_the_server_lives_on(
    channel: grpc.aio.Channel, method: MethodDescriptor
) -> None:
    for data in MALFORMED:
        assert await call_raw(channel, method, data) is grpc.StatusCode.INVALID_ARGUMENT, data
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=BUFFER.full_name))
    assert health.status == health_pb2.HealthCheckResponse.SERVING


# Empty messages are well-formed; these calls have an answer for them.
ANSWERED_WHEN_EMPTY = {"ListStreams", "RenewLeases", "GetStats"}


@pytest.mark.parametrize("method", [m for m in methods(BUFFER) if m.name != "Watch"], ids=lambda m: m.name)
async def test_an_empty_request_is_answered_or_refused_but_never_a_bug(
    channel: grpc.aio.Channel, method: MethodDescriptor
) -> None:
    refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    expected = {grpc.StatusCode.OK} if method.name in ANSWERED_WHEN_EMPTY else refused
    assert await call_raw(channel, method, b"") in expected
