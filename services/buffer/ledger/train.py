"""Commands of the trainer: batches out, steps consumed and committed, rewinds.

Only the trainer of the newest epoch is heard. A batch belongs to its step from the first LeaseBatch until the step is
committed, across consumption and rewinds: step s trains on the same groups in the same order however often it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from headrace.errors import FailedPrecondition, Fenced
from headrace.limits import MAX_STEPS_AHEAD
from headrace.trajectory import Failure
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.stream import Selection
from services.buffer.ledger.work import MAX_CHANGES, Work, remembered


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The groups of a step in training order, and their digest."""

    groups: tuple[Group, ...]
    digest: bytes


def lease_batch(work: Work, stream: IndexedStream, epoch: int, step: int) -> StepBatch | None:
    """Returns the step's batch, or None if too few groups are ready. After the next step's, one more may be leased."""
    _check_epoch(stream, epoch)
    _check_leasable(stream, step)
    groups = stream.batch(step) or _choose(work, stream, step)
    return _batch(stream, step, groups) if groups else None


def _batch(stream: IndexedStream, step: int, groups: Sequence[Group]) -> StepBatch:
    return StepBatch(tuple(groups), stream.batch_digest(step))


def _choose(work: Work, stream: IndexedStream, step: int) -> list[Group]:
    state = stream.state
    is_ahead = step > state.step
    if is_ahead and state.config.max_staleness == 0:
        return []  # what is ready now is too stale by then
    # The next step has its batch when the one after it is asked for: nothing else will be trained before `step`.
    if work.expire_stale(stream, step) == MAX_CHANGES:
        return []  # there may be others: the next attempt goes on
    count = state.config.groups_per_step
    if state.config.selection is Selection.HOOK and stream.may_take(count):
        return []  # `choose` is its way to a batch
    if not stream.may_take(count):
        if not is_ahead:
            _check_not_starved(work, stream)
        return []
    chosen = [stream.groups[group_id] for group_id in stream.queues.take_batch(state, count)]
    return _give(work, stream, step, chosen) if chosen else []


def candidates(stream: IndexedStream, step: int) -> list[Group]:
    """Returns the groups for the user's function to choose from; none if the step has a batch or too few are READY."""
    config = stream.state.config
    if config.selection is not Selection.HOOK or stream.members(step) or not stream.may_take(config.groups_per_step):
        return []
    if step > stream.state.step and config.max_staleness == 0:
        return []
    return [stream.groups[group_id] for group_id in stream.queues.by_admission()]


def choose(
    work: Work, stream: IndexedStream, epoch: int, step: int, chosen: Sequence[str], dropped: Sequence[str]
) -> StepBatch | None:
    """Gives the step the chosen groups if they fill a batch and are all READY; `dropped` ones are never trained."""
    _check_epoch(stream, epoch)
    _check_leasable(stream, step)
    known = stream.batch(step)
    if known:
        return _batch(stream, step, known)
    for group_id in dropped:
        if stream.queues.is_ready(group_id):
            work.drop(stream, stream.groups[group_id], Failure("BUFFER_FILTER", "buffer_filter took it out"))
    if len(chosen) < stream.state.config.groups_per_step or not all(map(stream.queues.is_ready, chosen)):
        return None
    groups = _give(work, stream, step, [stream.groups[group_id] for group_id in chosen])
    return _batch(stream, step, groups)


def _give(work: Work, stream: IndexedStream, step: int, chosen: list[Group]) -> list[Group]:
    state = stream.state
    of_source = Counter(group.source for group in chosen)
    taken = tuple(state.taken_of(i) + of_source[i] for i in range(len(state.cursors)))
    work.set_state(stream, replace(state, num_taken=state.num_taken + len(chosen), taken=taken))
    return [work.change(stream, replace(group, step=step, batch_index=i), "batched") for i, group in enumerate(chosen)]


def _check_not_starved(work: Work, stream: IndexedStream) -> None:
    state = stream.state
    if work.transaction.events or not state.exhausted or not is_starved(stream):
        return
    raise FailedPrecondition(
        f"stream {state.name}: {_num_left(stream)} groups are left for step {state.step}, a batch has "
        f"{state.config.groups_per_step}, and the prompt file is read to its end: "
        f"submit prompts, raise num_epoch or lower num_rollout{_lost(stream)}",
        reason="EXHAUSTED",
    )


def _lost(stream: IndexedStream) -> str:
    """Says how many samples failed or were dropped, and the most frequent reason; empty when there are none."""
    production = stream.production
    lost = production.num_failed + production.num_dropped
    if not lost:
        return ""
    reason, count = next(iter(production.failures.items()))
    return f"; {lost} samples failed or were dropped, {count.num_samples} of them by {reason}: {count.example}"


def is_starved(stream: IndexedStream) -> bool:
    """True when the next batch cannot be filled unless more prompts are submitted."""
    return stream.state.config.has_source and _num_left(stream) < stream.state.config.groups_per_step


def _num_left(stream: IndexedStream) -> int:
    return stream.queues.num_queued + stream.counts[GroupState.LEASED] + stream.queues.num_ready


def consume(work: Work, stream: IndexedStream, epoch: int, step: int, digest: bytes) -> int:
    """Makes the next step's batch CONSUMED; returns the step after it."""
    _check_epoch(stream, epoch)
    _check_known(stream, step)
    groups = stream.batch(step)
    if groups is None:
        raise FailedPrecondition(f"step {step} of {stream.state.name} has no batch yet: LeaseBatch gives it one")
    if not stream.is_batch(step, digest):
        raise FailedPrecondition(
            f"step {step} of {stream.state.name} has the batch {stream.batch_digest(step).hex()[:16]}…, "
            f"not {digest.hex()[:16]}…: train on what LeaseBatch answered",
            reason="OTHER_BATCH",
        )
    if step == stream.state.step:
        work.set_state(stream, replace(stream.state, step=step + 1))
        for group in groups:
            ids = [record.sample_id for record in group.samples]
            work.change(stream, replace(group, state=GroupState.CONSUMED), "consumed", sample_ids=ids)
    return step + 1


def commit(work: Work, stream: IndexedStream, epoch: int, step: int) -> int:
    """Makes the groups of every step below `step` COMMITTED and deletes their payloads. Returns their number."""
    _check_commit(stream, epoch, step)
    state = stream.state
    members = _members(stream, state.committed_step, step)
    if step > state.committed_step:
        work.set_state(stream, replace(state, committed_step=step))
    for group in members:
        work.delete_payloads(group.samples)
        work.change(stream, replace(group, state=GroupState.COMMITTED, ended_step=group.step), "committed")
    delete_ended(work, stream)
    return len(members)


def commit_steps(stream: IndexedStream, epoch: int, step: int) -> list[int]:
    """Splits a commit into several, the last up to `step`, so that each changes about a chunk of groups."""
    _check_commit(stream, epoch, step)
    return [*_chunk_ends(stream, stream.state.committed_step, step), step]


def _chunk_ends(stream: IndexedStream, first: int, end: int) -> list[int]:
    """Returns the steps in (first, end) that complete a chunk of groups."""
    per_chunk = max(MAX_CHANGES // stream.state.config.groups_per_step, 1)
    return stream.batched_steps(first, end)[per_chunk::per_chunk]


def _check_commit(stream: IndexedStream, epoch: int, step: int) -> None:
    _check_epoch(stream, epoch)
    state = stream.state
    if step > state.step:
        raise FailedPrecondition(
            f"step {step} of {state.name} cannot be committed: steps below {state.step} are consumed so far"
        )


def delete_ended(work: Work, stream: IndexedStream) -> int:
    """Deletes a chunk of the groups that ended more than `retain_steps` steps ago; returns how many.

    They stay in the counts; `forgotten_step` moves with the last of them.
    """
    state = stream.state
    if state.config.retain_steps is None:
        return 0
    end = state.committed_step - state.config.retain_steps
    if end <= state.forgotten_step:
        return 0
    gone = [work.delete_group(stream, group_id) for group_id in stream.take_ended(end, MAX_CHANGES)]
    forgotten = Counter(state.forgotten) + Counter(group.state.value for group in gone)
    reached = end if len(gone) < MAX_CHANGES else state.forgotten_step
    work.set_state(stream, replace(state, forgotten_step=reached, forgotten=dict(forgotten)))
    if reached == end:
        steps = f"{state.forgotten_step} to {end - 1}"
        work.announce(stream, "forgotten", step=end, detail=f"ended groups of steps {steps}")
    return len(gone)


def rewind(
    work: Work, stream: IndexedStream, step: int, request_id: str | None, least_epoch: int = 0, num_back: int = 0
) -> tuple[int, int]:
    """Makes the batches from `step` on READY again; returns (new epoch, groups). A new epoch fences earlier ones.

    Without a request_id it is a part of a longer rewind, and `num_back` counts the groups of such parts.
    """
    state = stream.state
    if request_id is not None and request_id in state.rewinds:
        return state.rewinds[request_id]
    _check_rewind(stream, step, least_epoch)
    back = _members(stream, step, state.step)
    skipped = _skipped(stream, state.step, step)
    answer = (max(state.epoch + 1, least_epoch), len(back) + num_back)
    rewinds = state.rewinds if request_id is None else remembered(state.rewinds, request_id, answer)
    work.set_state(stream, replace(state, epoch=answer[0], epoch_start=step, step=step, rewinds=rewinds))
    for group in skipped:
        ids = [record.sample_id for record in group.samples]
        used = replace(group, state=GroupState.CONSUMED)
        work.change(stream, used, "consumed", sample_ids=ids, detail="the trainer's checkpoint has it")
    for group in back:
        work.change(stream, replace(group, state=GroupState.READY), "rewound")
    work.announce(stream, "rewound", detail=f"from step {state.step}")
    return answer


def rewind_steps(stream: IndexedStream, step: int, request_id: str, least_epoch: int) -> list[int]:
    """Splits a rewind into several before the one to `step`, so that each changes about a chunk of groups."""
    if request_id in stream.state.rewinds:
        return []
    _check_rewind(stream, step, least_epoch)
    return _chunk_ends(stream, step, stream.state.step)[::-1]


def _check_rewind(stream: IndexedStream, step: int, least_epoch: int) -> None:
    """Lets a ledger that was restored from a backup be behind its trainer, but by no more steps than a run may have."""
    state = stream.state
    if step < state.committed_step:
        raise FailedPrecondition(
            f"stream {state.name} has committed every step below {state.committed_step} and deleted their samples: "
            f"step {step} is no longer available; restore a checkpoint of step {state.committed_step} or later",
            reason="COMMITTED",
        )
    for name, number, known in (("step", step, state.step), ("least_epoch", least_epoch, state.epoch)):
        _check_ahead(state.name, name, number, known)


def _check_ahead(stream: str, name: str, number: int, known: int) -> None:
    if number > known + MAX_STEPS_AHEAD:
        raise FailedPrecondition(
            f"{name} {number} is more than {MAX_STEPS_AHEAD} ahead of {known}, where stream {stream} is: "
            "no run has come so far since; see whether the number, or the ledger, is another run's",
            reason="TOO_FAR_AHEAD",
        )


def _skipped(stream: IndexedStream, first: int, end: int) -> list[Group]:
    """Returns READY groups in batches that the trainer's checkpoint has passed: it was trained on them.

    A fenced trainer saved before it knew, or the ledger was restored from a backup.
    """
    return [g for g in _members(stream, first, end) if g.state is GroupState.READY]


def set_policy_version(work: Work, stream: IndexedStream, epoch: int, policy_version: int) -> int:
    """Notes which weights the engines serve; returns how many groups expired, at most a chunk."""
    _check_epoch(stream, epoch)
    state = stream.state
    _check_ahead(state.name, "policy_version", policy_version, state.step)
    if policy_version < state.policy_version and state.policy_epoch == epoch:
        raise FailedPrecondition(
            f"stream {state.name} is at policy version {state.policy_version}, {policy_version} is older: "
            "it goes back only after Rewind"
        )
    if (policy_version, epoch) != (state.policy_version, state.policy_epoch):
        work.set_state(stream, replace(state, policy_version=policy_version, policy_epoch=epoch))
        work.announce(stream, "policy_version")
    return work.expire_stale(stream, stream.state.step)


def _members(stream: IndexedStream, first: int, end: int) -> list[Group]:
    return [group for step in stream.batched_steps(first, end) for group in stream.members(step)]


def _check_epoch(stream: IndexedStream, epoch: int) -> None:
    current = stream.state.epoch
    if epoch > current:
        raise FailedPrecondition(
            f"epoch {epoch} of {stream.state.name} was never opened here, the newest is {current}: call Rewind first",
            reason="EPOCH_UNKNOWN",
        )
    if epoch < current:
        raise Fenced(
            f"epoch {epoch} of {stream.state.name} is over: a newer trainer opened epoch {current}; stop this trainer"
        )
    if current == 0:
        raise FailedPrecondition(
            f"stream {stream.state.name} has no trainer yet: call Rewind first", reason="EPOCH_UNKNOWN"
        )


def _check_leasable(stream: IndexedStream, step: int) -> None:
    if step != stream.state.step + 1 or stream.batch(stream.state.step) is None:
        _check_known(stream, step)


def _check_known(stream: IndexedStream, step: int) -> None:
    state = stream.state
    if max(state.epoch_start, state.committed_step) <= step <= state.step:
        return
    raise FailedPrecondition(
        f"step {step} of {state.name} is not available in epoch {state.epoch}; the next is {state.step}, "
        f"and steps from {max(state.epoch_start, state.committed_step)} on can be leased again"
    )
