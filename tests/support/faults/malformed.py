"""Bytes that are no message, sent to any method of any server: the methods are found in the service descriptors."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

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
            async for _ in channel.unary_stream(path, None, None)(data, timeout=60):
                pass
        else:
            await channel.unary_unary(path, None, None)(data, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
