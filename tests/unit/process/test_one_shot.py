"""A process that does one thing: its answer, its lines, and that it never outlives its caller's patience."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from headrace.process.child import OneShot, run_once
from headrace.process.linux import runs

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
