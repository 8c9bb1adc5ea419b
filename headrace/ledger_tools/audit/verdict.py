"""The ledger's word against the trainer's.

lost         the ledger kept it or says a step used it, and it is neither there nor in what that step was fed
doubled      it went into two steps of the run that lives on, or twice into one
unaccounted  a step was fed with it and the ledger does not say so
Everything else that does not fit is in `others`, see `finding`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from headrace.ledger_tools.audit.batches import compare_batch, compare_rerun, is_superseded
from headrace.ledger_tools.audit.comparison import compare
from headrace.ledger_tools.audit.feeding import compare_lines
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger
from headrace.ledger_tools.audit.record import Record

_SAMPLE_KINDS = ("lost", "doubled", "unaccounted")


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Sample ids, sorted; and sentences."""

    lost: Sequence[str]
    doubled: Sequence[str]
    unaccounted: Sequence[str]
    others: Sequence[Finding] = ()

    @property
    def is_clean(self) -> bool:
        """True when nothing was found."""
        return not (self.lost or self.doubled or self.unaccounted or self.others)


def verdict_of(
    ledgers: Sequence[AuditedLedger],
    record: Record,
    *,
    num_lines_before: int | None = None,
    found: Iterable[Finding] = (),
) -> AuditVerdict:
    """The ledgers are the shards, in their order; `found` is what was found before.

    The record was read after the ledgers; `num_lines_before` lines of it were there before them (None: all).
    """
    num_lines_before = len(record.lines) if num_lines_before is None else num_lines_before
    next_step = min(ledger.replay.steps.next_step for ledger in ledgers)
    known = Record([each for i, each in enumerate(record.lines) if i < num_lines_before or each.step < next_step])
    findings = [*found, *record.findings, *compare_lines(ledgers, record, num_lines_before)]
    for ledger in ledgers:
        findings += [*ledger.replay.findings, *compare(ledger), *_not_fed(ledger, known)]
        findings += [Finding("doubled", sample_id) for sample_id in ledger.replay.steps.twice]
    living = {step: line for step, line in known.last_lines.items() if not is_superseded(ledgers, line)}
    for line in known.lines:
        last = known.last_lines[line.step]
        if line is not last:
            findings += compare_rerun(ledgers, line, last)
        elif line.step in living:
            findings += compare_batch(ledgers, line)
    times = Counter(sample_id for line in living.values() for sample_id in line.sample_ids)
    findings += [Finding("doubled", sample_id) for sample_id, count in times.items() if count > 1]
    ids = {kind: sorted({each.what for each in findings if each.kind == kind}) for kind in _SAMPLE_KINDS}
    others = list(dict.fromkeys(each for each in findings if each.kind not in _SAMPLE_KINDS))
    return AuditVerdict(ids["lost"], ids["doubled"], ids["unaccounted"], others)


def _not_fed(ledger: AuditedLedger, record: Record) -> Iterator[Finding]:
    for step, group_ids in ledger.replay.steps.used.items():
        fed = set(record.last_lines[step].sample_ids) if step in record.last_lines else set()
        for sample_id in ledger.replay.samples_of(group_ids):
            if sample_id not in fed:
                yield Finding("lost", sample_id)
