"""`python -m tests.support.fakes.bare_server`: a gRPC server of our calls that does nothing but let them wait.

What a waiting call costs here is grpc.aio's own; the crowd test holds the buffer against it. Prints its address.
GetStats answers how many wait, as the position.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.rpc.server import OPTIONS


class WaitingServicer(buffer_pb2_grpc.BufferServiceServicer):
    def __init__(self) -> None:
        self._num_waiting = 0

    async def LeaseGroups(self, request: pb.LeaseGroupsRequest, context: Any) -> pb.LeaseGroupsResponse:
        await self._wait()
        return pb.LeaseGroupsResponse()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        await self._wait()
        yield pb.WatchResponse()

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        return pb.GetStatsResponse(position=self._num_waiting)

    async def _wait(self) -> None:
        self._num_waiting += 1
        await asyncio.Event().wait()


async def main() -> None:
    server = grpc.aio.server(options=list(OPTIONS))
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(WaitingServicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # to the end of whoever started it
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
