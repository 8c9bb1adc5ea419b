"""Asks a service whether it serves, with the standard gRPC health protocol.

`python -m headrace.launch.health HOST:PORT` ends with 0 if it does: for the health check of a container.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.rpc.client import connect

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


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(is_serving(sys.argv[1])) else 1)
