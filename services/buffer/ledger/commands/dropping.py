"""An operator takes groups out for good: poison that no check caught, and groups whose records are damaged.

A batch that is not consumed is dissolved when a group leaves it: its other groups are READY without a batch, and the
step's next LeaseBatch chooses again. This is the one way in which a step's batch changes, and the history says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.trajectory import Failure
from headrace.wire.limits import MAX_GROUPS_PER_STEP
from services.buffer.ledger.book import StreamBook
from services.buffer.ledger.commands.work import Work
from services.buffer.ledger.group import Group, GroupState, Prompt

DROP_REASON = "OPERATOR"
_MAX_REMEMBERED = 256
_WAY_OUT = {
    GroupState.CONSUMED: "a step has trained on it: stop the trainer, let Rewind take the step back, and drop it then",
    GroupState.COMMITTED: "a checkpoint was trained on it: go back to an earlier checkpoint of the run",
}


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of a drop request: dropped groups and dissolved batches."""

    num_groups: int
    num_batches: int


def drop(work: Work, book: StreamBook, request_id: str, group_ids: Sequence[str], reason: str) -> Dropped:
    """Makes all of these groups DROPPED, or none. A repeated request changes nothing and gets the first answer."""
    if request_id not in book.state.drops:
        lost = [group_id for group_id in group_ids if group_id in book.lost_groups]
        found = [_droppable(book, group_id) for group_id in group_ids if group_id not in book.lost_groups]
        groups = [group for group in found if group.state is not GroupState.DROPPED]
        steps = {group.step for group in groups if group.step is not None}
        if lost:
            steps.update(_steps_that_lack_groups(book))
        _check_size(book, steps)
        dropped = Dropped(len(groups) + len(lost), len(steps))
        _take_back(work, book, steps)
        for group in groups:
            _drop(work, book, group, Failure(DROP_REASON, reason))
        for group_id in lost:
            _drop_lost(work, book, group_id, Failure(DROP_REASON, f"its record was damaged: {reason}"))
        for step in sorted(steps):
            _dissolve(work, book, step)
        remembered = dict(list(book.state.drops.items())[1 - _MAX_REMEMBERED :])
        numbers = (dropped.num_groups, dropped.num_batches)
        work.set_state(book, replace(book.state, drops={**remembered, request_id: numbers}))
    return Dropped(*book.state.drops[request_id])


def _droppable(book: StreamBook, group_id: str) -> Group:
    if group_id not in book.groups:
        raise NotFound(f"stream {book.state.name} has no group {group_id}")
    group = book.groups[group_id]
    if group.state in _WAY_OUT:
        raise FailedPrecondition(
            f"group {group_id} is {group.state.value}, {_WAY_OUT[group.state]}", reason=group.state.value
        )
    return group


def _steps_that_lack_groups(book: StreamBook) -> list[int]:
    """Returns the steps with incomplete batches; the record of a lost group no longer says which was its own."""
    steps = book.incomplete_steps()
    if steps and steps[0] < book.state.step:
        raise FailedPrecondition(
            f"the batch of step {steps[0]}, which is consumed, lacks a group whose record is damaged: "
            f"{_WAY_OUT[GroupState.CONSUMED]}, or wait until a checkpoint has it",
            reason=GroupState.CONSUMED.value,
        )
    return steps


def _check_size(book: StreamBook, steps: Iterable[int]) -> None:
    """Refuses to change more groups in one command than one step may have."""
    sizes = [len(book.members(step)) for step in steps]
    if len(sizes) > 1 and sum(sizes) > MAX_GROUPS_PER_STEP:
        raise InvalidArgument(
            f"the batches of {len(sizes)} steps, with {sum(sizes)} groups, would be dissolved, one call dissolves "
            f"{MAX_GROUPS_PER_STEP}: drop these groups in several calls",
            field="group_ids",
            reason="BATCH_TOO_LARGE",
        )


def _take_back(work: Work, book: StreamBook, steps: Iterable[int]) -> None:
    """Corrects the counts of groups taken, for the limiter and for each source's share."""
    state = book.state
    members = [group for step in steps for group in book.members(step)]
    of_source = Counter(group.source for group in members)
    taken = tuple(state.taken_of(i) - of_source[i] for i in range(len(state.cursors)))
    work.set_state(book, replace(state, num_taken=state.num_taken - len(members), taken=taken))


def _drop(work: Work, book: StreamBook, group: Group, failure: Failure) -> None:
    if group.state is GroupState.QUEUED:
        book.lanes.discard_queued(group)
    elif group.state is GroupState.LEASED:
        group = work.end_lease(group)
    work.drop(book, group, failure)


def _drop_lost(work: Work, book: StreamBook, group_id: str, failure: Failure) -> None:
    """Puts a DROPPED group of this name in the place of the damaged record."""
    book.lost_groups.remove(group_id)
    prompt = Prompt(f"\0{group_id}", b"")  # not anybody's: ids hold no control characters
    work.transaction.new_groups.append(group_id)
    work.drop(book, Group(group_id, book.state.name, book.seq_of(group_id), prompt), failure)


def _dissolve(work: Work, book: StreamBook, step: int) -> None:
    for group in book.members(step):
        free = replace(group, step=None, batch_index=None)
        work.change(book, free, "unbatched", step=step, detail=f"a group of the batch of step {step} was dropped")
