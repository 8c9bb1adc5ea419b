"""A line of the trainer's record against the step's batch: the same samples, in their order, under the same digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product

from headrace.digest import batch_digest, batch_digest_of_0_1
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger
from headrace.ledger_tools.audit.record import RecordLine

_FEW_SHARDS = 8


def compare_batch(ledgers: Sequence[AuditedLedger], line: RecordLine) -> Iterator[Finding]:
    """The line whose weights live on; also of a step that a kill kept the trainer from consuming: it has its batch."""
    batch = [sample_id for ledger in ledgers for sample_id in _samples(ledger, line.step)]
    if list(line.sample_ids) == batch:
        yield from _compare_digest(ledgers, line)
        return
    yield from (Finding("unaccounted", sample_id) for sample_id in line.sample_ids if sample_id not in batch)
    if missing := [sample_id for sample_id in batch if sample_id not in line.sample_ids]:
        yield Finding("batch", f"of step {line.step} was fed without {missing} (line {line.number})")
    elif sorted(line.sample_ids) == sorted(batch):
        place = next(i for i, pair in enumerate(zip(line.sample_ids, batch, strict=True)) if pair[0] != pair[1])
        yield Finding(
            "order",
            f"line {line.number} feeds step {line.step} its batch in another order: sample {place} is "
            f"{line.sample_ids[place]}, in the ledger {batch[place]}",
        )


def is_superseded(ledgers: Sequence[AuditedLedger], line: RecordLine) -> bool:
    """It feeds what was the step's batch until an operator dropped a group of it, and no step has consumed since."""
    every = [ledger.replay.steps for ledger in ledgers]
    if any(steps.used.get(line.step) for steps in every):
        return False
    has_changed = any(line.step in steps.earlier for steps in every)
    parts = [(_part(ledger, line), ledger) for ledger in ledgers]
    return (
        has_changed
        and any(part != _samples(ledger, line.step) for part, ledger in parts)
        and all(part in _versions(ledger, line.step) for part, ledger in parts)
    )


def compare_rerun(ledgers: Sequence[AuditedLedger], line: RecordLine, last: RecordLine) -> Iterator[Finding]:
    """A line of a step that was run again later: with the same data, unless groups were taken out of its batch."""
    if line.sample_ids == last.sample_ids:
        digests = _digests(ledgers, line.step)
        if line.digest != last.digest and digests is not None and not {line.digest, last.digest} <= digests:
            what = f"lines {line.number} and {last.number} feed step {line.step} the same samples as {_two(line, last)}"
            yield Finding("digest", what)
        return
    if all(_part(ledger, line) in _versions(ledger, line.step) for ledger in ledgers):
        return
    only = [[each for each in a.sample_ids if each not in b.sample_ids] for a, b in ((line, last), (last, line))]
    yield Finding(
        "rerun",
        f"step {line.step} was fed other samples before it was run again: line {line.number} has {only[0]}, "
        f"line {last.number} has {only[1]}" + ("" if any(only) else ", in another order"),
    )


def _compare_digest(ledgers: Sequence[AuditedLedger], line: RecordLine) -> Iterator[Finding]:
    digests = _digests(ledgers, line.step)
    if digests is not None and line.digest not in digests:
        yield Finding(
            "digest",
            f"line {line.number} feeds step {line.step} the batch {line.digest[:16]}…, in the ledger its samples, "
            f"rewards and policy versions give {min(digests)[:16]}…",
        )


def _digests(ledgers: Sequence[AuditedLedger], step: int) -> set[str] | None:
    """Computes the digests that LeaseBatch may have answered; None where a group is forgotten.

    While shards were upgraded, each may have been of either release.
    """
    parts = [_digests_of_shard(ledger, step) for ledger in ledgers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if len(known) == 1:
        return {digest.hex() for digest in known[0]}
    mixed = product(*known) if len(known) <= _FEW_SHARDS else zip(*known, strict=False)
    return {hashlib.sha256(b"".join(part)).hexdigest() for part in mixed}


def _digests_of_shard(ledger: AuditedLedger, step: int) -> list[bytes] | None:
    group_ids = ledger.replay.steps.batches.get(step, ())
    if any(group_id not in ledger.groups for group_id in group_ids):
        return None
    groups = [ledger.groups[group_id] for group_id in group_ids]
    of_0_1 = batch_digest_of_0_1((group.group_id, [each.digest for each in group.samples]) for group in groups)
    return [batch_digest(group.digest for group in groups), of_0_1]


def _samples(ledger: AuditedLedger, step: int) -> tuple[str, ...]:
    return ledger.replay.samples_of(ledger.replay.steps.batches.get(step, ()))


def _part(ledger: AuditedLedger, line: RecordLine) -> tuple[str, ...]:
    """The part of one shard."""
    return tuple(sample_id for sample_id in line.sample_ids if sample_id in ledger.replay.home)


def _versions(ledger: AuditedLedger, step: int) -> Sequence[tuple[str, ...]]:
    return [_samples(ledger, step), *ledger.replay.steps.earlier.get(step, ())]


def _two(line: RecordLine, last: RecordLine) -> str:
    return f"{line.digest[:16]}… and {last.digest[:16]}…"
