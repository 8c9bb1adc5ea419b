"""Processes that headrace starts: they end with their starter, leave nothing behind, and what they take is known."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.process.child import Child, OneShot, run_once
from headrace.process.linux import free_bytes, of_tree, runs
from tests.support.faults.file_limit import files_end_at
from tests.support.processes.leftovers import parent_of

ELSEWHERE = (
    "import subprocess, sys, time\n"
    "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('grandchild', grandchild.pid, flush=True)\n"
    "time.sleep(600)\n"
)
"""A server that starts a process in another session, as SGLang starts its detokenizer."""

STARTERS = {
    "an engine": """
from services.rollout.engine.process import ServerProcess
process = ServerProcess("http://127.0.0.1:1", command, log, {})
start = process.start(seconds=600)
""",
    "a service": """
from headrace.launch.process import ServiceProcess, ServiceSpec
start = ServiceProcess(ServiceSpec("reward", command, "127.0.0.1:1", "127.0.0.1:1", log, 600.0)).start()
""",
    "ranks": """
from headrace.launch.process import ServiceProcess, ServiceSpec
command = [sys.executable, "-m", "headrace.launch.ranks.local", "2", str(log.parent), *command]
start = ServiceProcess(ServiceSpec("trainer", command, "127.0.0.1:1", "127.0.0.1:1", log, 600.0)).start()
""",
    "a rank of Ray": """
from headrace.launch.ranks.ray import Rank
start = Rank(str(log)).run(command, ".", {})
""",
}

PARENT = """
import asyncio, sys
from pathlib import Path
log, command = Path(sys.argv[1]), [sys.executable, "-c", sys.argv[2]]
{starter}
async def main():
    await start
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("starter", STARTERS)
async def test_nothing_outlives_a_starter_that_was_killed(starter: str, tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT.replace("{starter}", STARTERS[starter]), str(log), ELSEWHERE
    )
    logs = [log, tmp_path / "trainer-rank-1.log"] if starter == "ranks" else [log]
    grandchildren: list[int] = []
    async with asyncio.timeout(120):
        while len(grandchildren) < len(logs):
            grandchildren = [pid for each in logs for pid in grandchildren_in(each)]
            await asyncio.sleep(0.01)  # another party's state
    started = [pid for each in grandchildren for pid in (each, parent_of(each))]
    assert all(runs(pid) for pid in started)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(60):
        while any(runs(pid) for pid in started):  # another party's state
            await asyncio.sleep(0.01)


async def test_stop_ends_what_ignores_a_signal_and_everything_it_started(tmp_path: Path) -> None:
    process = Child([sys.executable, "-c", IGNORES + ELSEWHERE], tmp_path / "log", {})
    await process.start()
    grandchild = await grandchild_in(tmp_path / "log")
    await process.stop(grace_seconds=0.1)
    assert process.exit_code == 128 + signal.SIGKILL
    assert not runs(grandchild)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


async def grandchild_in(log: Path) -> int:
    async with asyncio.timeout(60):
        while not (found := grandchildren_in(log)):  # another party's state
            await asyncio.sleep(0.01)
    return found[0]


def grandchildren_in(log: Path) -> list[int]:
    return (
        [int(pid) for pid in re.findall(r"^grandchild (\d+)$", log.read_text(), re.MULTILINE)] if log.exists() else []
    )


async def test_a_process_starts_again_though_its_log_cannot_grow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("what the start before said\n")
    process = Child([sys.executable, "-c", "raise SystemExit(7)"], log, {})
    with files_end_at(log.stat().st_size):
        await process.start()
        assert await process.wait() == 7


ENDLESS = "import os, sys, threading; print(os.getpid(), file=sys.stderr, flush=True); threading.Event().wait()"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def test_it_returns_the_exit_code_the_answer_and_the_last_lines_of_stderr() -> None:
    program = "import sys; print('yes'); [print(n, file=sys.stderr) for n in range(20)]; sys.exit(3)"
    done = await run_once(python(program), os.environ)
    assert (done.exit_code, done.out) == (3, b"yes\n")
    assert done.last_lines == tuple(map(str, range(12, 20)))


async def test_input_that_the_process_does_not_read_is_no_error_of_its_caller() -> None:
    process = await OneShot.start(python("import sys; sys.stdin.close(); sys.exit('no')"), os.environ)
    done = await process.result(b"x" * 4_000_000, seconds=60.0)
    assert (done.exit_code, done.last_lines) == (1, ("no",))


async def until_ended(pid: int) -> None:
    async with asyncio.timeout(60):
        while runs(pid):
            await asyncio.sleep(0.01)


async def test_a_process_is_killed_at_its_deadline() -> None:
    pids = list[str]()
    process = await OneShot.start(python(ENDLESS), os.environ)
    with pytest.raises(TimeoutError):
        await process.result(seconds=2.0, takes=lambda line: bool(pids.append(line)))
    await asyncio.gather(*(until_ended(int(pid)) for pid in pids))


async def test_a_process_is_killed_when_nobody_waits_for_it_any_more() -> None:
    started = asyncio.get_running_loop().create_future()
    process = await OneShot.start(python(ENDLESS), os.environ)
    waiting = asyncio.create_task(process.result(seconds=None, takes=lambda line: bool(started.set_result(int(line)))))
    pid = await asyncio.wait_for(started, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until_ended(pid)


HOLDS_64_MIB = "import sys; held = bytearray(64 << 20); print('.', flush=True); sys.stdin.read()"


async def test_a_process_takes_its_memory_and_that_of_those_below_it() -> None:
    before = of_tree(os.getpid())
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_64_MIB], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        assert 64 << 20 < of_tree(holder.pid) < 256 << 20
        assert of_tree(os.getpid()) > before + (32 << 20)
    finally:
        holder.kill()
        holder.communicate()
    assert of_tree(holder.pid) == 0


def test_what_is_free_is_the_machines_or_the_containers_where_that_is_less(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:      50 kB\n")
    assert free_bytes(tmp_path, tmp_path / "no cgroup") == 50 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path, tmp_path) == 50 << 10
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    (tmp_path / "memory.max").write_text("40000\n")
    assert free_bytes(tmp_path, tmp_path) == 15_000
    (tmp_path / "memory.max").write_text("20000\n")
    assert free_bytes(tmp_path, tmp_path) == 0
    assert free_bytes() > 0
