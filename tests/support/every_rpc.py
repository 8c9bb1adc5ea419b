"""All four services with servicers that only say which call reached them, on one server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from headrace.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.rpc.server import RpcServer, Service

_MODULES = (
    (buffer_pb2, buffer_pb2_grpc.add_BufferServiceServicer_to_server),
    (rollout_pb2, rollout_pb2_grpc.add_RolloutServiceServicer_to_server),
    (reward_pb2, reward_pb2_grpc.add_RewardServiceServicer_to_server),
    (trainer_pb2, trainer_pb2_grpc.add_TrainerServiceServicer_to_server),
)


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of the protocol, as its descriptor has it."""

    service: str
    method: str
    streams: bool
    streams_requests: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"


def _described() -> Iterator[tuple[Rpc, Any]]:
    for module, _ in _MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for each in service.methods:
                yield Rpc(service.full_name, each.name, each.server_streaming, each.client_streaming), each


RPCS = tuple(rpc for rpc, _ in _described())


class _Servicer:
    def __init__(self, service: str, reached: list[str]) -> None:
        for rpc, described in _described():
            if rpc.service == service:
                setattr(self, rpc.method, self._behavior(rpc, GetMessageClass(described.output_type), reached))

    def _behavior(self, rpc: Rpc, answer: Callable[[], Any], reached: list[str]) -> Any:
        async def unary(request: Any, context: Any) -> Any:
            reached.append(rpc.path)
            return answer()

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            reached.append(rpc.path)
            yield answer()

        return stream if rpc.streams else unary


@asynccontextmanager
async def serving_every_rpc(**options: Any) -> AsyncIterator[tuple[RpcServer, list[str]]]:
    """The server, and the paths of the calls that reach its servicers. `options` are RpcServer's."""
    reached: list[str] = []
    services = [
        Service(_Servicer(service.full_name, reached), add, service.full_name)
        for module, add in _MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    server = RpcServer("x", "127.0.0.1:0", services, **options)
    await server.start()
    try:
        yield server, reached
    finally:
        await server.stop(0.0)


async def code_of_call(channel: grpc.aio.Channel, rpc: Rpc, request: bytes = b"") -> tuple[grpc.StatusCode, str]:
    """Calls with these bytes; the status, and its message."""
    try:
        if rpc.streams:
            async for _ in channel.unary_stream(rpc.path, None, None)(request, timeout=60.0):
                pass
        else:
            await channel.unary_unary(rpc.path, None, None)(request, timeout=60.0)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
