"""A ledger that a release wrote is read and trained on today, with either release's client; not the other way."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.ledger_tools.audit_run import audit_ledger
from services.buffer.store.base import Store
from services.buffer.store.sqlite import SqliteStore
from tests.support.processes.buffer_server import served_buffer
from tests.upgrade import driver
from tests.upgrade.release import RELEASES, Release, ReleaseBuffer, extracted

pytestmark = pytest.mark.timeout(300)
long = pytest.mark.skipif("HEADRACE_UPGRADE" not in os.environ, reason="long: make chaos sets HEADRACE_UPGRADE")


@pytest.fixture(scope="module", params=RELEASES, ids=lambda entry: str(entry["name"]))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return extracted(request.param, tmp_path_factory.mktemp("release"))


@asynccontextmanager
async def todays(store: Store, folder: Path) -> AsyncIterator[str]:
    columns = folder / "ledger" / "columns"
    async with served_buffer(store, columns_folder=columns) as (_, server):
        yield server.address


async def audited(address: str, folder: Path) -> None:
    found = await audit_ledger(address, driver.STREAM, folder / "trained.jsonl", deep=True)
    assert found.verdict.is_clean, found.verdict
    assert (found.num_steps, found.num_samples) == (5, 20)


async def test_a_ledger_of_the_release_goes_on_today_with_either_client(release: Release, tmp_path: Path) -> None:
    """Its groups are queued, leased, ready, consumed, committed, failed and dropped; a column lies out of line."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    async with ReleaseBuffer(release, first) as buffer:
        await release.drive("begin", buffer.address, first)
    shutil.copytree(first, second)
    async with todays(SqliteStore(first / "ledger"), first) as address:
        await release.drive("go_on", address, first)
        await audited(address, first)
    async with todays(SqliteStore(second / "ledger"), second) as address:
        await driver.main("go_on", address, second)
        await audited(address, second)


async def test_a_backup_of_the_release_is_restored_and_goes_on_today(release: Release, tmp_path: Path) -> None:
    """0.1.0 keeps payloads in files that are deleted with their last payload."""
    written, restored = tmp_path / "written", tmp_path / "restored"
    written.mkdir()
    async with ReleaseBuffer(release, written) as buffer:
        await release.drive("begin", buffer.address, written)
        await release.backup(buffer.address, tmp_path / "copy")
    shutil.copytree(written, restored, ignore=shutil.ignore_patterns("ledger"))
    assert await asyncio.to_thread(main, ["buffer", "restore", str(tmp_path / "copy"), str(restored / "ledger")]) == 0
    async with todays(SqliteStore(restored / "ledger"), restored) as address:
        await driver.main("go_on", address, restored)
        await audited(address, restored)


@long
@pytest.mark.parametrize("release", [RELEASES[-1]], indirect=True, ids=["v0.1.0"])
async def test_the_release_refuses_a_ledger_of_today_and_loses_nothing(release: Release, tmp_path: Path) -> None:
    async with todays(SqliteStore(tmp_path / "ledger"), tmp_path) as address:
        await driver.main("begin", address, tmp_path)
    async with ReleaseBuffer(release, tmp_path) as buffer:
        code, said = await asyncio.wait_for(buffer.ended(), 60)
    assert code == 2
    assert "has layout 4, this headrace reads 3" in said
    async with todays(SqliteStore(tmp_path / "ledger"), tmp_path) as address:
        await driver.main("go_on", address, tmp_path)
        await audited(address, tmp_path)
