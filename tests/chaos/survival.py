"""One whole run, of which each process is killed in each phase; it goes on by itself after each, and loses nothing.

`python -m tests.chaos.survival FOLDER [PHASE…]` prints each outcome and the table; test_survival.py is the same under
`make chaos`. The services, the launcher and the ranks are the real ones; the engine has no model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.commands.ledger import audited
from headrace.client.buffer import BufferClient
from headrace.ledger_tools.audit_run import described
from headrace.process.linux import descendants, runs
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.leftovers import parent_of
from tests.support.processes.stand_in_run import StandInRun

_FLAGS = ("--num-rollout", "1000000", "--save-interval", "4", "--use-fault-tolerance")
_EVENTS: Mapping[str, str] = {
    "lease": "leased",
    "put": "put",
    "batch": "batched",
    "consume": "consumed",
    "commit": "committed",
}
PHASES = (*_EVENTS, "checkpoint", "publish")
ENGINE, LAUNCHER, GUARD = "engine", "launcher", "guard"
_PROCESSES: Mapping[str, tuple[str, str]] = {
    "buffer": ("buffer", ""),
    "guard of the buffer": ("buffer", GUARD),
    "reward": ("reward", ""),
    "reward worker": ("reward", "multiprocessing.forkserver"),
    "rollout": ("rollout", ""),
    "router": ("rollout", "router"),
    "trainer": ("trainer", ""),
    "trainer rank": ("trainer", "services.trainer"),
    "guard of the trainer": ("trainer", GUARD),
}
"""The service, and a word in the command line of the process below it; "" for its own process, GUARD above it."""
_MORE_STEPS = 3
_GO_ON_SECONDS = _END_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one kill in one phase."""

    process: str
    phase: str
    away_seconds: float
    """From the kill to the next steps; of a launcher, from the next command."""


async def survive(folder: Path, phases: Sequence[str] = PHASES) -> tuple[Sequence[Outcome], bool]:
    """Kills each process in each phase, the launcher last: the same command continues the run at once.

    So no launcher sees more deaths of one service than it puts up with in ten minutes. Returns what became of each,
    and whether the audit found nothing. Raises AssertionError with the ends of all logs where the run does not go on,
    or something outlives what started it.
    """
    run = StandInRun(folder, make_tiny_qwen3(folder / "model"), *_FLAGS)
    outcomes: list[Outcome] = []
    left: Sequence[int] = ()
    for number, phase in enumerate((*phases, "")):  # the last only goes on from a checkpoint
        began = asyncio.get_running_loop().time()
        async with run.started():
            await _more_steps(run)
            assert not (alive := _commands_of(left)), alive
            if number:
                _add(outcomes, Outcome(LAUNCHER, phases[number - 1], _since(began)))
            if phase:
                for process in (*_PROCESSES, ENGINE):
                    _add(outcomes, await _killed(run, process, phase))
                await _until_phase(run, phase)
                left = descendants(run.run.pid)
                os.kill(run.run.pid, signal.SIGKILL)
                await _until(lambda: not run.run.is_running, _END_SECONDS)
    found = await audited(run.run.folder, "train", 60.0, deep=True)
    print(_table(outcomes, phases), described(found), sep="\n")
    return outcomes, found.verdict.is_clean


async def _killed(run: StandInRun, process: str, phase: str) -> Outcome:
    await _until_phase(run, phase)
    pid = _pid_of(run, process)
    below = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    began = asyncio.get_running_loop().time()
    if process == ENGINE:
        await run.kill_engine()
        await run.start_engine()
    await _more_steps(run)
    assert not (alive := _commands_of(below)), alive
    return Outcome(process, phase, _since(began))


def _pid_of(run: StandInRun, process: str) -> int:
    """The process as it runs now."""
    if process == ENGINE:
        assert run.engine is not None
        return run.engine.pid
    service, word = _PROCESSES[process]
    pid = run.pid(service)
    if not word:
        return pid
    if word == GUARD:
        guard = parent_of(pid)
        assert "headrace.process.guard" in _command(guard), f"{service} has no guard: it has ended"
        return guard
    below = [each for each in descendants(pid) if word in _command(each)]
    assert below, f"{service} has no {process}: {[_command(each) for each in descendants(pid)]}"
    return below[-1]


async def _until_phase(run: StandInRun, phase: str) -> None:
    """The next time from now on, within milliseconds. Raises TimeoutError when it does not come in two minutes."""
    async with asyncio.timeout(120):
        if phase in _EVENTS:
            async with BufferClient(await run.run.address_of("buffer")) as client:
                position = await client.position()
                async with aclosing(client.watch("train", position + 1)) as events:
                    async for event in events:
                        if event.kind == _EVENTS[phase]:
                            return
        elif phase == "checkpoint":
            await _until(lambda: any((run.run.folder.path / "checkpoints").glob(".draft-*")))
        else:
            log = run.run.folder.logs / "rollout.log"
            begun = log.read_bytes().count(b'"publication_begun"')
            await _until(lambda: log.read_bytes().count(b'"publication_begun"') > begun)


async def _until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.001)


async def _more_steps(run: StandInRun) -> None:
    """A trainer that starts again goes back to its checkpoint: what it wrote down of its steps counts."""
    file = run.run.folder.training_record
    before = _lines(file)
    try:
        async with asyncio.timeout(_GO_ON_SECONDS):
            while _lines(file) < before + _MORE_STEPS:
                assert run.run.is_running, run.run.last_words()
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"no step in {_GO_ON_SECONDS:g} s\n{run.run.last_words()}") from None


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _commands_of(pids: Sequence[int]) -> Sequence[str]:
    """Of those that run."""
    return [f"{pid}: {_command(pid)}" for pid in pids if runs(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _since(began: float) -> float:
    return round(asyncio.get_running_loop().time() - began, 1)


def _add(outcomes: list[Outcome], outcome: Outcome) -> None:
    outcomes.append(outcome)
    print(outcome, flush=True)


def _table(outcomes: Sequence[Outcome], phases: Sequence[str]) -> str:
    """Processes × phases, and how often each was survived."""
    counts = Counter((each.process, each.phase) for each in outcomes)
    lines = [f"| kill -9 of | {' | '.join(phases)} | longest away |", "|" + " --- |" * (len(phases) + 2)]
    for process in dict.fromkeys(each.process for each in outcomes):
        numbers = [str(counts[process, phase] or "") for phase in phases]
        longest = max(each.away_seconds for each in outcomes if each.process == process)
        lines.append(f"| {process} | {' | '.join(numbers)} | {longest:.0f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(survive(Path(sys.argv[1]), sys.argv[2:] or PHASES))[1] else 1)
