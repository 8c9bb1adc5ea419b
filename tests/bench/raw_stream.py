"""What gRPC alone carries here: unary calls of opaque bytes to a process that throws them away."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import grpc
import uvloop

from headrace.rpc.client import connect
from headrace.rpc.net import free_port
from headrace.rpc.server import OPTIONS
from tests.bench.cpu import cpu_seconds

_METHOD = "/raw.Raw/Take"


async def raw_samples_per_second(size: int, num_samples: int, per_call: int, in_flight: int) -> tuple[float, float]:
    """Of `size` bytes each, `per_call` in a message; and CPU seconds of both sides for one."""
    address = f"127.0.0.1:{free_port()}"
    server = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.raw_stream", address)
    message = os.urandom(size * per_call)
    calls = iter(range(num_samples // per_call))
    try:
        async with connect(address) as channel:
            take = channel.unary_unary(_METHOD, None, None)
            await take(b"", wait_for_ready=True, timeout=30)

            async def one() -> None:
                for _ in calls:
                    await take(message, timeout=30)

            started, cpu = time.perf_counter(), cpu_seconds(server.pid)
            await asyncio.gather(*(one() for _ in range(in_flight)))
            seconds = time.perf_counter() - started
            return num_samples / seconds, (cpu_seconds(server.pid) - cpu) / num_samples
    finally:
        server.kill()
        await server.wait()


async def serve(address: str) -> None:
    async def take(request: bytes, context: object) -> bytes:
        return b""

    handler = grpc.method_handlers_generic_handler("raw.Raw", {"Take": grpc.unary_unary_rpc_method_handler(take)})
    server = grpc.aio.server(options=list(OPTIONS))
    server.add_generic_rpc_handlers([handler])
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
