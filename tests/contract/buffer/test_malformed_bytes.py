"""Bytes that are no message, to every method of the buffer: INVALID_ARGUMENT, and the server lives on.

The other services get them while they work: tests/e2e/test_training.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.api.buffer.v1 import buffer_pb2
from services.buffer.store.memory import MemoryStore
from tests.support.faults.malformed import MALFORMED, call_raw, methods
from tests.support.processes.buffer_server import served_buffer

BUFFER = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"]


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
    refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
    expected = {grpc.StatusCode.OK} if method.name in ANSWERED_WHEN_EMPTY else refused
    assert await call_raw(channel, method, b"") in expected
