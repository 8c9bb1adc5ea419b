from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.rollout.engine.child import ChildProcess

PARENT = """
import asyncio, sys
from pathlib import Path
from services.rollout.engine.child import ChildProcess

async def main():
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"], Path(sys.argv[1]), {})
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path / "log")), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child_pid = int(await parent.stdout.readline())
    await until_launched(child_pid)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(50):
        while is_running(child_pid):  # another party's state
            await asyncio.sleep(0.01)


async def test_stop_ends_what_ignores_a_signal_and_everything_it_started(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('last words', flush=True); time.sleep(600)"
    child = ChildProcess([sys.executable, "-c", code], tmp_path / "log", {})
    await child.start()
    async with asyncio.timeout(50):
        while "last words" not in child.last_lines():  # another party's state
            await asyncio.sleep(0.01)
    await child.stop(grace_seconds=0.1)
    assert child.exit_code == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


async def until_launched(pid: int) -> None:
    """Until the launcher has become the program: only then its parent's death is its own."""
    async with asyncio.timeout(50):
        while "services.rollout.engine.launch" in command_of(pid):  # another party's state
            await asyncio.sleep(0.01)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
