"""A child: it ends with its starter, leaves nothing behind, and its log keeps what it said."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from headrace.process.child import Child
from headrace.process.linux import parent_of, runs
from tests.support.faults.file_limit import files_end_at

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
start = ServiceProcess.start(ServiceSpec("reward", command, "127.0.0.1:1", "127.0.0.1:1", log, 600.0))
""",
    "ranks": """
from headrace.launch.process import ServiceProcess, ServiceSpec
command = [sys.executable, "-m", "headrace.launch.ranks.local", "2", str(log.parent), *command]
start = ServiceProcess.start(ServiceSpec("trainer", command, "127.0.0.1:1", "127.0.0.1:1", log, 600.0))
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


async def test_a_log_keeps_why_the_start_before_ended(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    for words in ("out of memory", "all is well"):
        process = Child([sys.executable, "-c", f"print({words!r})"], log, {})
        await process.start()
        assert await process.wait() == 0
        assert process.last_lines() == words
    assert "out of memory" in log.read_text()
    assert re.search(r"^---- started again at .* UTC ----$", log.read_text(), re.MULTILINE)


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
