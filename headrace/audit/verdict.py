"""The ledger's word against the trainer's.

lost         the ledger kept it or says a step used it, and it is neither there nor in what that step was fed
doubled      it went into two steps of the run that lives on, or twice into one
unaccounted  a step was fed with it and the ledger does not say so
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.audit.history import History


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sample ids, sorted."""

    lost: Sequence[str]
    doubled: Sequence[str]
    unaccounted: Sequence[str]

    @property
    def is_clean(self) -> bool:
        """Nothing of the three."""
        return not (self.lost or self.doubled or self.unaccounted)


def judge(history: History, kept: Mapping[str, Sequence[str]], fed: Mapping[int, Sequence[str]]) -> Verdict:
    """`kept` is what ListGroups shows: group → sample ids; `fed` is the trainer's record: step → sample ids.

    A step beyond the consumed ones was fed before a kill kept the trainer from saying so: its batch is the ledger's.
    """
    consumed, next_step = history.consumed(), history.next_step
    lost = _missing(history, kept)
    unaccounted: set[str] = set()
    for step in consumed.keys() | fed.keys():
        of_trainer = set(fed.get(step, ()))
        of_ledger = set(consumed.get(step, ())) if step < next_step else _batch(history, step)
        unaccounted |= of_trainer - of_ledger
        if step < next_step:
            lost |= of_ledger - of_trainer
    times = Counter(sample_id for ids in fed.values() for sample_id in ids)
    doubled = {sample_id for sample_id, count in times.items() if count > 1} | set(history.consumed_twice)
    return Verdict(sorted(lost), sorted(doubled), sorted(unaccounted))


def _missing(history: History, kept: Mapping[str, Sequence[str]]) -> set[str]:
    """Samples that were put, and not given up, of which the ledger shows nothing; it may forget committed ones."""
    missing: set[str] = set()
    for group_id, sample_ids in history.held.items():
        if group_id in kept:
            missing |= set(sample_ids) - set(kept[group_id])
        elif group_id not in history.committed:
            missing |= set(sample_ids)
    return missing


def _batch(history: History, step: int) -> set[str]:
    groups = [group_id for group_id, of in history.batched.items() if of == step]
    return {sample_id for group_id in groups for sample_id in history.held.get(group_id, ())}


def judge_shards(
    shards: Sequence[tuple[History, Mapping[str, Sequence[str]]]], fed: Mapping[int, Sequence[str]]
) -> Verdict:
    """Each shard's history and what it keeps, against its own part of what the steps were fed.

    Shards need not have come equally far: a kill may fall between their consumptions of one step.
    """
    own: list[dict[int, list[str]]] = [{step: [] for step in fed} for _ in shards]
    strangers: set[str] = set()
    for step, sample_ids in fed.items():
        for sample_id in sample_ids:
            homes = [part for (history, _), part in zip(shards, own, strict=True) if sample_id in history.put]
            for part in homes:
                part[step].append(sample_id)
            if not homes:
                strangers.add(sample_id)
    verdicts = [judge(history, kept, part) for (history, kept), part in zip(shards, own, strict=True)]
    return Verdict(
        lost=sorted({sample_id for verdict in verdicts for sample_id in verdict.lost}),
        doubled=sorted({sample_id for verdict in verdicts for sample_id in verdict.doubled}),
        unaccounted=sorted({sample_id for verdict in verdicts for sample_id in verdict.unaccounted} | strangers),
    )
