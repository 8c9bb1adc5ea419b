"""Two buffers on one PostgreSQL ledger: one owns it, the other takes over, and clients only reconnect."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psycopg

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.errors import Fenced
from headrace.job.schema.run import RunSection
from headrace.job.schema.services import BufferSection
from services.buffer.build import open_store
from services.buffer.store.postgres import PostgresStore
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.ledgers.ledger_under_test import LedgerUnderTest
from tests.support.processes.buffer_server import BufferProcess
from tests.support.processes.postgres import cluster, needs_postgres
from tests.support.refusals import refused

pytestmark = needs_postgres


def server(folder: Path, run_name: str) -> BufferProcess:
    folder.mkdir()
    section = BufferSection(max_staleness=99, buffer_store="postgres", buffer_postgres=cluster())
    return BufferProcess(folder, None, buffer=section, run=RunSection(run_name=run_name))


async def produce(client: BufferClient, acknowledged: dict[str, bytes], count: int) -> None:
    """Puts so many groups; what is answered is noted."""
    for _ in range(count):
        number = len(acknowledged)
        await client.submit_prompts("train", text_prompts(f"q{number}"))
        for lease in (await client.lease_groups("train", "p", 1)).leases:
            put = complete_put(lease)
            (result,) = await client.put_groups([put])
            assert result.state == pb.GROUP_STATE_READY
            acknowledged.update((s.envelope.sample_id, s.envelope.digest) for s in put.samples)


async def test_when_the_active_server_is_killed_the_standby_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    active, standby = server(tmp_path / "a", "failover"), server(tmp_path / "b", "failover")
    acknowledged: dict[str, bytes] = {}
    await active.start()
    try:
        async with BufferClient(active.address) as client:
            await client.stats("train")
        await standby.start()
        async with BufferClient(f"{active.address}|{standby.address}") as client, asyncio.timeout(240):
            for _ in range(2):
                await produce(client, acknowledged, 3)
                producing = asyncio.create_task(produce(client, acknowledged, 5))
                await asyncio.sleep(0.02)  # a kill in the middle of whatever happens
                await active.kill()
                await producing
                await active.start()
                active, standby = standby, active
            samples = await client.fetch_samples("train", sorted(acknowledged))
            assert {s.envelope.sample_id: s.envelope.digest for s in samples} == acknowledged
            assert len(acknowledged) == 2 * 8 * 2
        owned = [json.loads(line) for process in (active, standby) for line in process.log.splitlines()]
        assert {line["owner_epoch"] for line in owned if line["event"] == "ledger_owned"} >= {1, 2, 3}
    finally:
        await active.kill()
        await standby.kill()


def test_an_owner_that_lost_its_claim_is_fenced_and_changes_nothing() -> None:
    store = PostgresStore(cluster(), "fenced")
    it = LedgerUnderTest(store)
    it.create()
    with psycopg.connect(cluster(), autocommit=True) as admin:  # the network forgets the owner's claim
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' "
            "AND query LIKE '%FOR UPDATE SKIP LOCKED%'"
        )
    heir = PostgresStore(cluster(), "fenced")
    with refused(Fenced, "headrace_fenced", "epoch 1", "epoch 2"):
        it.submit("too late")
    assert heir.load().groups == ()
    heir.close()


def test_runs_of_different_names_have_ledgers_of_their_own(tmp_path: Path) -> None:
    section = BufferSection(buffer_store="postgres", buffer_postgres=cluster())
    first, second = (open_store(section, tmp_path, name) for name in ("one-run", "another-run"))
    try:
        assert first.load().ledger_id != second.load().ledger_id
    finally:
        first.close()
        second.close()
