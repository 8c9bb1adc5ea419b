"""One run under many faults, one after the other, and what became of each."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.cli.commands.ledger import audited
from headrace.ledger_tools.audit_run import described
from tests.chaos.survival.faults import Fault, Killed, KilledLauncher
from tests.chaos.survival.phases import until_phase
from tests.support.processes.stand_in_run import StandInRun

_MORE_STEPS = 3
_GO_ON_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one fault in one phase."""

    fault: str
    phase: str
    away_seconds: float
    """From the end of the fault to the next steps; of a launcher, from the next command."""
    restarts: int
    """Services that the launcher started again."""


@dataclass(frozen=True, slots=True)
class Survived:
    """What a run looked like in the end."""

    outcomes: Sequence[Outcome]
    is_clean: bool
    """Nothing of the audit's, and no step that took less than no time."""
    audit: str
    told: str

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1))


async def campaign(
    run: StandInRun, cases: Sequence[tuple[Fault, str]], launcher: KilledLauncher | None = None
) -> Survived:
    """Strikes in each phase, and waits each time for the run to go on by itself. Ends it, continues it, and audits.

    With `launcher`, its end, that strikes last in each phase; the same command continues the run at once. So no
    launcher sees more deaths of one service than it puts up with in ten minutes.

    Raises AssertionError with the ends of all logs where it does not go on, or something outlives what started it.
    """
    outcomes: list[Outcome] = []
    told, ended_in = "", ""
    for part in (*(_by_phase(cases) if launcher else [cases]), ()):  # the last only goes on from a checkpoint
        began = asyncio.get_running_loop().time()
        async with run.started():
            await _more_steps(run)
            if launcher and ended_in:
                assert not (left := launcher.outlived_by()), left
                away = asyncio.get_running_loop().time() - began
                _add(outcomes, Outcome(launcher.name, ended_in, round(away, 1), 0))
            for fault, phase in part:
                _add(outcomes, await _one(run, fault, phase))
            if launcher and part:
                ended_in = part[-1][1]
                await until_phase(run, ended_in)
                await launcher.strike(run)
                await launcher.heal(run)
        told += run.run.log.read_text(errors="replace")
    found = await audited(run.run.folder, "train", 60.0, deep=True)
    negative = [
        f"step {row['step']}: {name} is {value}"
        for row in run.run.metrics()
        for name, value in row.items()
        if name.startswith("time/") and value < 0
    ]
    is_clean = found.verdict.is_clean and not negative
    return Survived(outcomes, is_clean, "\n".join([described(found), *negative]), told)


def _by_phase(cases: Sequence[tuple[Fault, str]]) -> Sequence[Sequence[tuple[Fault, str]]]:
    return [[case for case in cases if case[1] == phase] for phase in dict.fromkeys(phase for _, phase in cases)]


def _add(outcomes: list[Outcome], outcome: Outcome) -> None:
    outcomes.append(outcome)
    print(outcome, flush=True)


async def _one(run: StandInRun, fault: Fault, phase: str) -> Outcome:
    before = _restarts(run)
    await until_phase(run, phase)
    await fault.strike(run)
    await fault.heal(run)
    healed = asyncio.get_running_loop().time()
    await _more_steps(run)
    away = asyncio.get_running_loop().time() - healed
    if isinstance(fault, Killed):
        assert not (left := fault.outlived_by()), left
    return Outcome(fault.name, phase, round(away, 1), _restarts(run) - before)


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


def _restarts(run: StandInRun) -> int:
    return run.run.log.read_text(errors="replace").count(": restart ")


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def table(outcomes: Sequence[Outcome], phases: Sequence[str]) -> str:
    """Faults × phases, and how often each was survived."""
    counts = Counter((each.fault, each.phase) for each in outcomes)
    faults = sorted({each.fault for each in outcomes})
    lines = [f"| fault | {' | '.join(phases)} | longest away |", "|" + " --- |" * (len(phases) + 2)]
    for fault in faults:
        numbers = [str(counts[fault, phase] or "") for phase in phases]
        longest = max(each.away_seconds for each in outcomes if each.fault == fault)
        lines.append(f"| {fault} | {' | '.join(numbers)} | {longest:.0f} s |")
    return "\n".join(lines)
