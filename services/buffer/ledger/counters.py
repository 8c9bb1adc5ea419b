"""Compares a stream's counters with its groups when a ledger is loaded, and corrects those that contradict them.

A number that is too low would be given to two groups, so it is never trusted blindly.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.indexed_stream import IndexedStream
from services.buffer.ledger.stream import StreamState

_TRAINABLE = (GroupState.READY, GroupState.CONSUMED, GroupState.COMMITTED)


def corrected(stream: IndexedStream, *, is_complete: bool) -> tuple[StreamState, list[str]]:
    """Returns the state to use, and a sentence for each counter or group that contradicts the others.

    `is_complete`: no group of the stream is known to be lost, so that groups can be counted.
    """
    state, groups = stream.state, stream.groups.values()
    is_complete = is_complete and not stream.incomplete_steps()
    batched = [group for group in groups if group.step is not None and group.state in _TRAINABLE]
    committed = state.forgotten.get(GroupState.COMMITTED.value, 0)
    num_groups = len(groups) + sum(state.forgotten.values())
    next_seq = max(max((group.seq for group in groups), default=-1) + 1, state.first_seq + num_groups)
    num_inserted = sum(stream.counts[one] for one in _TRAINABLE) + committed
    right = {"next_seq": max(state.next_seq, next_seq), "num_inserted": max(state.num_inserted, num_inserted)}
    if is_complete:
        right["num_taken"] = len(batched) + committed
    changed = {name: value for name, value in right.items() if value != getattr(state, name)}
    problems = [
        f"stream {state.name}: its {name} is {getattr(state, name)}, and its groups give {value}, which is used instead"
        for name, value in changed.items()
    ]
    if is_complete and state.taken and not state.forgotten:
        of_source = Counter(group.source for group in batched)
        taken = tuple(of_source[i] for i in range(len(state.taken)))
        if taken != state.taken:
            problems.append(
                f"stream {state.name}: by its counters its sources gave {list(state.taken)} groups to batches, by its "
                f"groups {list(taken)}, which is used instead"
            )
            state = replace(state, taken=taken)
    problems += [problem for group in batched if (problem := _step_problem(state, group))]
    return replace(state, **changed), problems


def _step_problem(state: StreamState, group: Group) -> str | None:
    assert group.step is not None, "the caller passes groups of batches"
    first, end = state.committed_step, state.step
    is_right = {
        GroupState.READY: group.step >= end,
        GroupState.CONSUMED: first <= group.step < end,
        GroupState.COMMITTED: group.step < first,
    }[group.state]
    if is_right:
        return None
    return (
        f"group {group.group_id} is {group.state.value} in the batch of step {group.step}, and stream {state.name} has "
        f"consumed the steps below {end} and committed those below {first}"
    )
