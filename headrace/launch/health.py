"""Asks a service whether it serves, with the standard gRPC health protocol."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.channel import connect

_ASK_SECONDS = 2.0


async def is_serving(address: str) -> bool:
    """False when there is no response within two seconds, or another status than SERVING."""
    async with connect(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_ASK_SECONDS
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
