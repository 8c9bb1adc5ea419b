"""The order of the trainer's lines against the ledger's epochs.

A trainer writes a step's line before it tells the ledger that the step is consumed. So each epoch has a line for every
step that it consumed, in their order, and may have one more, of the step after those: a kill, or a newer trainer, came
between the line and the ledger. An older trainer that does not know of the newer one writes that line late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger
from headrace.ledger_tools.audit.record import Record, RecordLine


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A line that has to be there."""

    epoch: int
    step: int


def compare_lines(ledgers: Sequence[AuditedLedger], record: Record, num_lines_before: int) -> Iterator[Finding]:
    """Lines after the first `num_lines_before` may be newer than the history, and are passed over at the end."""
    wanted, late = _expected(ledgers)
    spare: Counter[int] = Counter()
    at = 0
    for i, line in enumerate(record.lines):
        spare.update(late.pop(at, ()))
        if at < len(wanted) and line.step == wanted[at].step:
            at += 1
        elif spare[line.step]:
            spare[line.step] -= 1
        elif at == len(wanted):
            if i < num_lines_before:
                yield _found(line, f"after step {wanted[-1].step}, the last that was consumed" if wanted else "first")
        elif (end := _resumed(wanted, at, line, record.lines[i + 1 : i + 2])) is None:
            yield _found(line, f"where epoch {wanted[at].epoch} consumed step {wanted[at].step} next")
        else:
            for missing in wanted[at:end]:
                yield _missing(missing, f" before line {line.number}")
            for passed in range(at + 1, end + 1):
                spare.update(late.pop(passed, ()))
            at = end + 1
    for missing in wanted[at:]:
        yield _missing(missing, "")


def _expected(ledgers: Sequence[AuditedLedger]) -> tuple[list[_Wanted], dict[int, list[int]]]:
    """The lines in order; and after how many of them there may be a further one, of which step."""
    consumed: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for ledger in ledgers:
        for epoch in ledger.replay.steps.epochs:
            consumed.setdefault(epoch.number, set()).update(epoch.consumed)
            first.setdefault(epoch.number, epoch.first_step)
    wanted: list[_Wanted] = []
    late: dict[int, list[int]] = {}
    for number in sorted(consumed):
        wanted += [_Wanted(number, step) for step in sorted(consumed[number])]
        late.setdefault(len(wanted), []).append(max(consumed[number], default=first[number] - 1) + 1)
    return wanted, late


def _resumed(wanted: Sequence[_Wanted], at: int, line: RecordLine, following: Sequence[RecordLine]) -> int | None:
    """The index at which the line is expected if those before it are missing; None when the line itself is surplus."""
    if following and following[0].step == wanted[at].step:
        return None
    return next((i for i in range(at + 1, len(wanted)) if wanted[i].step == line.step), None)


def _found(line: RecordLine, where: str) -> Finding:
    return Finding("record", f"line {line.number} feeds step {line.step} {where}")


def _missing(wanted: _Wanted, where: str) -> Finding:
    return Finding("record", f"has no line of step {wanted.step}, which epoch {wanted.epoch} consumed{where}")
