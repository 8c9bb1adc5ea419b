"""Out of memory, a clock that jumps, a disk that fills up: real ones, each process by itself.

`make chaos` sets HEADRACE_SURVIVAL and hurts a whole run in every phase (`python -m tests.chaos.survival`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.launch.process import ServiceSpec
from headrace.launch.supervisor import RestartPolicy, Supervisor
from headrace.process.workers import WorkerCrashed, WorkerPool
from headrace.rpc.net import free_port
from tests.chaos.survival.clock import clock_environment, library
from tests.chaos.survival.phases import PHASES
from tests.support.faults.out_of_memory import is_possible, kill_for_memory
from tests.support.faults.small_disk import in_own_namespace
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import ROOT, BufferProcess

needs_cgroup = pytest.mark.skipif(not is_possible(), reason="this user may not make a memory cgroup")
needs_faketime = pytest.mark.skipif(library() is None, reason="no libfaketime: apt-get install faketime")
SERVICE = ROOT / "tests" / "unit" / "launch" / "fake_service.py"
KINDS = os.environ.get("HEADRACE_SURVIVAL", "").split()


@needs_cgroup
async def test_a_service_that_the_kernel_killed_for_memory_is_said_to_be_with_what_it_had_and_starts_again(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    pids: dict[str, int] = {}
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(SERVICE), "--address", address, "--children", str(tmp_path / "children")]
    spec = ServiceSpec("fake", command, address, "127.0.0.1:0", tmp_path / "log", 120.0)
    policy = RestartPolicy(first_backoff_seconds=0.05)
    running = asyncio.create_task(Supervisor([spec], None, told.append, policy, pids.update).run())
    try:
        async with asyncio.timeout(120):
            while not told:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(kill_for_memory, pids["fake"])
            while sum("ready" in line for line in told) < 2:
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    # On a busy machine the only look was at a process that had just been made.
    had = r"It had [\d.e+]+ [KM]iB resident"
    assert re.fullmatch(rf"fake ended with signal 9 \(killed: out of memory\? {had}\): restart 1 in 0\.05 s", told[1])


def judge(mark: str, number: int) -> int:
    """User code that takes its time on the first item, and says in which process."""
    if number == 0:
        Path(mark).write_text(str(os.getpid()))
        while True:
            bytearray(1 << 20)
    return number


@needs_cgroup
async def test_the_item_whose_worker_was_killed_for_memory_says_so_and_others_are_scored(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    pool = WorkerPool(2)
    await pool.start()
    try:
        first = asyncio.create_task(pool.run(judge, str(mark), 0, timeout_seconds=120))
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(kill_for_memory, int(mark.read_text()))
        with pytest.raises(WorkerCrashed, match=r"judge ended its worker .*SIGKILL \(killed: out of memory\?\)"):
            await first
        assert await pool.run(judge, str(mark), 7, timeout_seconds=120) == 7
    finally:
        await pool.close()


@needs_faketime
async def test_no_lease_ends_and_none_lasts_longer_when_the_wall_clock_jumps_by_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = tmp_path / "clock"
    for name, value in clock_environment(offset).items():
        monkeypatch.setenv(name, value)
    buffer = BufferProcess(tmp_path, None)
    config = pb.StreamConfig(name="short", n_samples_per_prompt=1, groups_per_step=1, lease_seconds=3.0)
    await buffer.start()
    try:
        async with asyncio.timeout(120), BufferClient(buffer.address) as client:
            await client.create_stream(config)
            await client.submit_prompts("short", text_prompts("a", "b", "c"))
            kept, lost = (await client.lease_groups("short", "p", 2)).leases
            for days in (3, -3):
                before = await now(client)
                offset.write_text(f"{days * 86400:+}\n")
                while abs(await now(client) - before) < 86400:
                    await client.renew_leases([kept.lease_id])
                    await asyncio.sleep(0.2)
                (result,) = await client.put_groups([complete_put(kept)]) if days < 0 else (None,)
            assert result is not None
            assert result.state == pb.GROUP_STATE_READY
            while "lease_expired" not in await kinds(client):
                await asyncio.sleep(0.1)
            (refused,) = await client.put_groups([complete_put(lost)])
            assert refused.refused.reason == "LEASE_LOST"
    finally:
        await buffer.kill()


async def now(client: BufferClient) -> float:
    """The buffer's wall clock: the time of an event that it writes now."""
    await client.submit_prompts("short", text_prompts(uuid.uuid4().hex))
    return (await history(client))[-1].time.ToNanoseconds() / 1e9


async def kinds(client: BufferClient) -> list[str]:
    return [event.kind for event in await history(client)]


async def history(client: BufferClient) -> list[pb.LedgerEvent]:
    end, found = await client.position(), []
    async for event in client.watch("short"):
        found.append(event)
        if event.position >= end:
            break
    return found


@pytest.mark.skipif(not KINDS, reason="long: make chaos sets HEADRACE_SURVIVAL to the kinds of harm")
@pytest.mark.ranks
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_goes_on_after_each_fault_in_each_phase_and_its_audit_finds_nothing(
    tmp_path: Path, kind: str
) -> None:
    phases = [phase for phase in PHASES if phase != "backup"]
    program = [sys.executable, "-m", "tests.chaos.survival", str(tmp_path), kind, *phases]
    command = in_own_namespace(program) if kind == "disk" else program
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    outcomes = json.loads((tmp_path / "survived.json").read_text())["outcomes"]
    assert {each["phase"] for each in outcomes} == set(phases)
