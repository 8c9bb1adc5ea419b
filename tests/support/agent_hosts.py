"""A rollout service whose agents are played by other processes, and such processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.client.rollout import RolloutClient
from headrace.rpc.server import Listen, RpcServer, Service
from headrace.rpc.tls import VARIABLE, TlsFolder
from services.rollout.agents import build
from services.rollout.server import RolloutServicer
from tests.support.agents import AGENT, Producing, producing
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE

LEASE_SECONDS = 200.0
NAME = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name


@contextlib.asynccontextmanager
async def lending(
    folder: Path,
    *,
    token_seconds: float = 0.0,
    code: str = AGENT,
    tls: TlsFolder | None = None,
    lease_seconds: float = LEASE_SECONDS,
    **options: Any,
) -> AsyncIterator[tuple[Producing, FakeEngine, RolloutClient, str]]:
    """A rollout service whose tasks are lent, behind gRPC."""
    options = {"agent_hosts": True, **options}
    engine = FakeEngine(WIRE, token_seconds=token_seconds)
    listen = Listen("127.0.0.1:0", tls=tls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "TASK_LEASE_SECONDS", lease_seconds)
        producer = producing(folder, code, lambda job: lambda number: engine, listen=listen, **options)
        async with producer as made:
            servicer = RolloutServicer(made.service.parts)
            server = RpcServer(
                "rollout",
                "127.0.0.1:0",
                [Service(servicer, rollout_pb2_grpc.add_RolloutServiceServicer_to_server, NAME)],
                tls=tls,
            )
            await server.start()
            async with RolloutClient(server.address) as client:
                yield made, engine, client, server.address
            await server.stop(grace_seconds=0.0)


@contextlib.asynccontextmanager
async def host(
    address: str, *words: str, python: str = sys.executable, tls_dir: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`headrace agent` as a process of its own, killed at the end."""
    environment = {**os.environ, **({VARIABLE: str(tls_dir)} if tls_dir else {})}
    command = (python, "-m", "headrace.cli.main", "agent", "--rollout-address", address, *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
