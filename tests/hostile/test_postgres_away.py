"""PostgreSQL is killed, stopped, or ends its sessions under load: the buffer waits, says so, and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headrace.client.buffer import BufferClient
from headrace.errors import Unavailable
from headrace.job.schema.run import RunSection
from headrace.job.schema.services import BufferSection
from headrace.launch.health import is_serving
from headrace.process.exit_status import PEER_AWAY
from headrace.run_folder import RunFolder, ServiceEntry
from services.buffer.store import postgres as postgres_store
from services.buffer.store.postgres import PostgresStore
from tests.chaos.workload import working
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.ledgers.ledger_under_test import LedgerUnderTest
from tests.support.processes.buffer_server import BufferProcess
from tests.support.processes.postgres import PostgresServer, needs_postgres
from tests.support.refusals import refused

pytestmark = needs_postgres

# `make chaos` asks for more, and for half a minute.
NUM_CUTS = int(os.environ.get("HEADRACE_POSTGRES_CUTS", "6"))
AWAY_SECONDS = float(os.environ.get("HEADRACE_POSTGRES_AWAY_SECONDS", "1"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.stop()


def buffer_of(folder: Path, postgres: PostgresServer, run_name: str, *, wait_seconds: float = 120.0) -> BufferProcess:
    folder.mkdir(exist_ok=True)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    section = BufferSection(
        max_staleness=1,
        buffer_store="postgres",
        buffer_postgres=postgres.dsn,
    )
    wait = f"services.buffer.build:DATABASE_WAIT_SECONDS={wait_seconds}"
    return BufferProcess(folder, prompts, constants=[wait], buffer=section, run=RunSection(run_name=run_name))


@pytest.mark.timeout(600)
async def test_a_server_that_is_killed_under_load_and_comes_back_costs_nothing(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    buffer = buffer_of(tmp_path, postgres, "killed")
    await buffer.start()
    pid = buffer.pid
    try:
        async with working(buffer, tmp_path) as workload:
            await workload.steps(2)
            postgres.kill()
            await _says_so(buffer.address)
            await asyncio.sleep(AWAY_SECONDS)
            await asyncio.to_thread(postgres.start)
            await workload.steps(3)
            assert await is_serving(buffer.address)
        assert buffer.pid == pid
        assert '"postgres_back"' in buffer.log
    finally:
        await buffer.kill()


async def _says_so(address: str) -> None:
    """UNAVAILABLE with RetryInfo and a sentence; health says NOT_SERVING."""
    async with asyncio.timeout(60):
        while await is_serving(address):
            await asyncio.sleep(0.05)
    async with BufferClient(address, deadline_seconds=1.0) as client:
        with refused(Unavailable, "PostgreSQL", "120 s") as told:
            await client.stats("train")
        assert told.value.retry_after_seconds == 1.0
        for call in (client.lease_groups("train", "p", 1), client.fetch_samples("train", ["x"])):
            with refused(Unavailable, "PostgreSQL"):
                await call
    assert "PostgreSQL has not answered" in await _status(address)


async def _status(address: str) -> str:
    """What `headrace status` prints of a run with this buffer."""
    with tempfile.TemporaryDirectory() as folder:
        RunFolder(Path(folder)).write_services({"buffer": ServiceEntry(address, None, None)})
        command = [sys.executable, "-m", "headrace.cli.main", "status", folder]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    assert process.returncode == 1
    return output.decode()


@pytest.mark.skipif("HEADRACE_POSTGRES_CUTS" not in os.environ, reason="long: make chaos sets HEADRACE_POSTGRES_CUTS")
@pytest.mark.timeout(600)
async def test_sessions_that_are_ended_at_random_points_cost_nothing(tmp_path: Path, postgres: PostgresServer) -> None:
    buffer = buffer_of(tmp_path, postgres, "cut")
    chance = random.Random(11)
    await buffer.start()
    try:
        async with working(buffer, tmp_path) as workload:
            await workload.steps(1)
            for _ in range(NUM_CUTS):
                await asyncio.sleep(chance.uniform(0.05, 0.4))
                purpose = chance.choice(["writer", "reader", "claim", ""])
                await asyncio.to_thread(postgres.end_sessions, f"headrace-%{purpose}")
            await workload.steps(2)
    finally:
        await buffer.kill()


async def test_a_database_that_stays_away_ends_the_buffer_with_its_own_exit_code(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    buffer = buffer_of(tmp_path, postgres, "away", wait_seconds=1.0)
    await buffer.start()
    try:
        async with BufferClient(buffer.address) as client:
            await client.stats("train")
            postgres.kill()
            submitting = asyncio.create_task(client.submit_prompts("train", text_prompts("x")))
            assert await buffer.wait() == PEER_AWAY
            submitting.cancel()
        assert "this buffer waits 1 s" in buffer.log
    finally:
        await buffer.kill()
        await asyncio.to_thread(postgres.start)


def test_a_commit_of_unknown_outcome_is_made_once(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends before COMMIT arrives, and after it was kept but before anybody heard so."""
    store = PostgresStore(postgres.dsn, "unknown")
    it = LedgerUnderTest(store)
    it.create()
    committed = psycopg.Transaction.__exit__
    for kept in (False, True, False, True):
        cuts = iter([True])

        def cut(self: psycopg.Transaction, *error: object, kept: bool = kept, cuts: Iterator[bool] = cuts) -> object:
            if next(cuts, False):
                if kept:
                    committed(self, *error)  # type: ignore[arg-type]
                postgres_store._cut(self.connection)
                raise psycopg.OperationalError("the connection is lost")
            return committed(self, *error)  # type: ignore[arg-type]

        monkeypatch.setattr(psycopg.Transaction, "__exit__", cut)
        position = it.ledger.position
        it.submit(f"prompt {position}")
        assert [event.position for event in store.read_events(position + 1, 10)] == [position + 1]
    assert len(store.load().groups) == 4
    store.close()


def test_a_server_that_hangs_is_cut_and_the_commit_made_again(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "_CONNECT_SECONDS", 2)
    monkeypatch.setattr(postgres_store.answered.__wrapped__, "__defaults__", (1.0,))  # type: ignore[attr-defined]
    store = PostgresStore(postgres.dsn, "hangs", wait_seconds=60.0)
    it = LedgerUnderTest(store)
    it.create()
    postgres.signal(signal.SIGSTOP)
    waking = threading.Timer(4.0, postgres.signal, (signal.SIGCONT,))
    waking.start()
    it.submit("after all")
    waking.join()
    assert len(store.load().groups) == 1
    store.close()
