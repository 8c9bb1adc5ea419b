"""Calls that loop, crash, raise or hang end as typed errors; the calls beside them go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.errors import ResourceExhausted
from headrace.process.workers import FairQueue, WorkerCrashed, WorkerPool, WorkerRaised, WorkerTimeout

LIMIT = 60.0
"""Of calls that end by themselves, however slow the machine is."""


def add(left: int, right: int) -> int:
    return left + right


def worker_pid() -> int:
    return os.getpid()


def loop_for_ever(mark: str) -> None:
    Path(mark).touch()
    while True:
        pass


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def divide_by_zero() -> float:
    return 1 / 0


def leave() -> None:
    sys.exit(3)


def unsendable() -> object:
    return threading.Lock()


def print_words() -> None:
    print("printed \ud800")
    subprocess.run(["echo", "by a program"], check=True)


async def fork_and_come_back() -> int:
    os.fork()
    await asyncio.sleep(0.05)
    return 1


def exit_later() -> None:
    threading.Timer(0.2, os._exit, (5,)).start()


def outlive(pid: int) -> str:
    """In the process `pid` it waits for the end that an earlier call has prepared."""
    if os.getpid() == pid:
        threading.Event().wait()
    return "alive"


def broken_preparation() -> None:
    raise ValueError("no such model")


async def nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def meet(folder: str, number: int, count: int) -> int:
    Path(folder, str(number)).touch()
    while len(os.listdir(folder)) < count:
        await asyncio.sleep(0.01)
    return number


async def block_the_loop() -> None:
    time.sleep(60)  # the point


async def touch_and_wait(mark: str) -> None:
    Path(mark).touch()
    await asyncio.sleep(60)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1)
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
async def shared() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1, calls_per_worker=8)
    await pool.start()
    yield pool
    await pool.close()


async def until(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.01)


async def test_an_endless_loop_is_killed_and_its_worker_replaced(pool: WorkerPool, tmp_path: Path) -> None:
    (before,) = pool.pids
    with pytest.raises(WorkerTimeout, match=r"loop_for_ever did not finish within 0\.3 s"):
        await pool.run(loop_for_ever, str(tmp_path / "mark"), timeout_seconds=0.3)
    assert await pool.run(worker_pid, timeout_seconds=LIMIT) != before
    assert not alive(before)


async def test_a_crash_is_typed_and_names_the_signal(pool: WorkerPool) -> None:
    with pytest.raises(WorkerCrashed, match="segfault ended its worker process with SIGSEGV"):
        await pool.run(segfault, timeout_seconds=LIMIT)
    assert await pool.run(add, 1, 1, timeout_seconds=LIMIT) == 2


async def test_what_a_function_prints_goes_to_the_stderr_of_its_service(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pool = WorkerPool(1)
    await pool.run(print_words, timeout_seconds=LIMIT)
    await pool.close()
    assert capfd.readouterr() == ("", "printed \\ud800\nby a program\n")


async def test_a_fork_in_user_code_answers_nothing_and_leaves_the_channel_alone(shared: WorkerPool) -> None:
    await shared.run(nap, 0.0, timeout_seconds=LIMIT)  # imports this module
    calls = [shared.run(fork_and_come_back, timeout_seconds=LIMIT) for _ in range(4)]
    assert await asyncio.gather(*calls, shared.run(nap, 0.1, timeout_seconds=LIMIT)) == [1, 1, 1, 1, 0.1]
    assert await shared.run(add, 1, 1, timeout_seconds=LIMIT) == 2


async def test_a_worker_that_served_before_fails_no_call_by_what_earlier_ones_left(pool: WorkerPool) -> None:
    (before,) = pool.pids
    await pool.run(exit_later, timeout_seconds=LIMIT)
    assert await pool.run(outlive, before, timeout_seconds=LIMIT) == "alive"


async def test_an_exception_keeps_its_traceback_and_its_worker(pool: WorkerPool) -> None:
    (before,) = pool.pids
    with pytest.raises(WorkerRaised, match="ZeroDivisionError: division by zero") as caught:
        await pool.run(divide_by_zero, timeout_seconds=LIMIT)
    assert "return 1 / 0" in caught.value.traceback
    with pytest.raises(WorkerRaised, match="SystemExit: 3"):
        await pool.run(leave, timeout_seconds=LIMIT)
    with pytest.raises(WorkerRaised, match="TypeError: a lock cannot leave its worker"):
        await pool.run(unsendable, timeout_seconds=LIMIT)
    assert await pool.run(worker_pid, timeout_seconds=LIMIT) == before


async def test_the_queue_is_bounded() -> None:
    pool = WorkerPool(1, max_waiting=2)
    await pool.start()
    calls = [asyncio.create_task(pool.run(nap, 0.2, timeout_seconds=LIMIT)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="2 calls already wait for 1 workers"):
        await pool.run(add, 1, 1, timeout_seconds=LIMIT)
    assert await asyncio.gather(*calls) == [0.2] * 3
    await pool.close()


async def test_a_cancelled_call_ends_its_worker_and_frees_its_place(pool: WorkerPool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    call = asyncio.create_task(pool.run(loop_for_ever, str(mark), timeout_seconds=60))
    await until(mark)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.run(add, 1, 1, timeout_seconds=LIMIT) == 2


async def test_coroutines_share_a_worker_and_their_waits(shared: WorkerPool, tmp_path: Path) -> None:
    await shared.run(nap, 0.0, timeout_seconds=LIMIT)  # imports this module
    met = [shared.run(meet, str(tmp_path), number, 8, timeout_seconds=LIMIT) for number in range(8)]
    assert await asyncio.gather(*met) == list(range(8)), "each waits for all others"


@pytest.mark.parametrize(("culprit", "error"), [(block_the_loop, WorkerTimeout), (segfault, WorkerCrashed)])
async def test_only_the_guilty_call_fails_when_a_shared_worker_ends(shared: WorkerPool, culprit, error) -> None:
    await shared.run(nap, 0.0, timeout_seconds=LIMIT)  # imports this module
    results = await asyncio.gather(
        *(shared.run(nap, 0.1, timeout_seconds=LIMIT) for _ in range(3)),
        shared.run(culprit, timeout_seconds=1 if error is WorkerTimeout else LIMIT),
        *(shared.run(nap, 0.1, timeout_seconds=LIMIT) for _ in range(3)),
        return_exceptions=True,
    )
    assert type(results.pop(3)) is error
    assert results == [0.1] * 6


async def test_an_abandoned_call_is_cancelled_in_the_shared_worker(shared: WorkerPool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    kept = asyncio.create_task(shared.run(nap, 1.0, timeout_seconds=LIMIT))
    dropped = asyncio.create_task(shared.run(touch_and_wait, str(mark), timeout_seconds=60))
    await until(mark)
    dropped.cancel()
    assert await kept == 1.0
    assert len(shared.pids) == 1


async def test_a_failed_preparation_fails_the_start() -> None:
    with pytest.raises(WorkerRaised, match="ValueError: no such model"):
        await WorkerPool(2, prepare=broken_preparation).start()


async def test_close_ends_the_workers() -> None:
    pool = WorkerPool(2)
    await pool.start()
    pids = pool.pids
    await pool.close()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


PARENT = """
import asyncio, sys
from headrace.process.workers import WorkerPool
from tests.unit.process.test_worker_pool import loop_for_ever
async def main():
    pool = WorkerPool(2)
    await pool.start()
    print(*pool.pids, flush=True)
    await pool.run(loop_for_ever, sys.argv[1], timeout_seconds=600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a computing orphan is ended by Linux's PR_SET_PDEATHSIG")
async def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    mark, root = tmp_path / "mark", Path(__file__).parents[3]
    command = [sys.executable, "-c", PARENT, str(mark)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    ) as parent:
        assert parent.stdout
        pids = [int(word) for word in parent.stdout.readline().split()]
        await until(mark)
        parent.kill()
        parent.wait()
    async with asyncio.timeout(60):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.01)
    assert len(pids) == 2


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before, or while it was read
        return False


async def test_callers_take_turns_and_calls_of_one_caller_keep_their_order() -> None:
    queue = FairQueue(["slot"])
    await queue.take("greedy")
    served = []

    async def call(caller: str, number: int) -> None:
        slot = await queue.take(caller)
        served.append((caller, number))
        queue.give(slot)

    calls = [*(call("greedy", number) for number in range(3)), call("modest", 0)]
    waiting = asyncio.gather(*calls)
    await asyncio.sleep(0)
    assert queue.waiting == 4
    queue.give("slot")
    await waiting
    assert served == [("greedy", 0), ("modest", 0), ("greedy", 1), ("greedy", 2)]
    assert queue.waiting == 0


async def test_a_slot_goes_past_a_caller_that_left_in_the_same_moment_and_is_not_lost() -> None:
    queue = FairQueue(["slot"])
    await queue.take("a")
    gone, after = (asyncio.create_task(queue.take(caller)) for caller in ("b", "c"))
    await asyncio.sleep(0)
    gone.cancel()
    queue.give("slot")
    assert await after == "slot"
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert queue.waiting == 0
    queue.give("slot")
    assert await queue.take("d") == "slot"
