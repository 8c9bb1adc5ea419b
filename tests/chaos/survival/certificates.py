"""`python -m tests.chaos.survival.certificates FOLDER CLOCK`: a connection, and new ones, while the clock is moved.

Run it in the environment of `clock_environment(CLOCK)`. Prints JSON: for each place of the clock whether the connection
that was there before is answered, and whether a new one is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.authority import issue_service
from headrace.rpc.client import connect
from headrace.rpc.server import RpcServer
from headrace.rpc.tls import VARIABLE, TlsFolder

DAYS = (0, 29, 31, 0, -2, 0)
"""The certificate is valid for 30 days from the first."""


async def main(folder: Path, clock: Path) -> None:
    issue_service(folder, (), 30)
    os.environ[VARIABLE] = str(folder)
    server = RpcServer("x", "127.0.0.1:0", [], tls=TlsFolder(folder))
    await server.start()
    began, found = time.time(), []
    async with connect(server.address) as old:
        for days in DAYS:
            clock.write_text(f"{days * 86400:+}\n")
            while abs(time.time() - began - days * 86400) > 3600:
                await asyncio.sleep(0.05)
            async with connect(server.address) as new:
                found.append([days, await answers(old), await answers(new)])
    await server.stop(0.0)
    print(json.dumps(found))


async def answers(channel: grpc.aio.Channel) -> bool:
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60.0)
    except grpc.aio.AioRpcError:
        return False
    return True


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
