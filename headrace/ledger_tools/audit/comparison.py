"""Compares a buffer's state with its own history: the state of every group, and every count."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.ledger_tools.audit.events import COMMITTED, CONSUMED, state_name
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger
from headrace.ledger_tools.audit.replay import GroupStory


def compare(ledger: AuditedLedger) -> Iterator[Finding]:
    """Groups that changed after the history was read are passed over."""
    for story in ledger.replay.groups.values():
        yield from _compare_group(ledger, story)
    for group in ledger.groups.values():
        if group.group_id not in ledger.replay.groups and group.position <= ledger.position:
            yield Finding("state", f"group {group.group_id} is in the ledger and no event made it")
        if ledger.stats is not None and group.position > ledger.position:
            yield Finding("history", f"has no event at position {group.position}, where group {group.group_id} changed")
    if ledger.stats is not None:
        yield from _compare_counts(ledger, ledger.stats)


def _compare_group(ledger: AuditedLedger, story: GroupStory) -> Iterator[Finding]:
    group = ledger.groups.get(story.group_id)
    if story.is_forgotten:
        return
    if group is None:
        if story.sample_ids:
            yield from (Finding("lost", sample_id) for sample_id in story.sample_ids)
        else:
            state = state_name(story.state)
            yield Finding("state", f"group {story.group_id} is {state} by its events and not in the ledger")
        return
    if group.position > ledger.position:
        return
    if (group.state, group.position) != (story.state, story.position):
        yield Finding(
            "state",
            f"group {story.group_id} is {state_name(group.state)} since position {group.position} in the ledger, "
            f"by its events {state_name(story.state)} since {story.position}",
        )
    shown = [sample.sample_id for sample in group.samples]
    yield from (Finding("lost", sample_id) for sample_id in story.sample_ids if sample_id not in shown)
    if set(shown) >= set(story.sample_ids) and tuple(shown) != tuple(story.sample_ids):
        what = f"group {story.group_id} shows the samples {shown}, it was put with {list(story.sample_ids)}"
        yield Finding("state", what)
    yield from _compare_step(ledger, group)


def _compare_step(ledger: AuditedLedger, group: pb.Group) -> Iterator[Finding]:
    by_events = ledger.replay.steps.step_of(group.group_id)
    shown = group.step if group.HasField("step") else None
    if by_events != shown:
        yield Finding("batch", f"group {group.group_id} is of step {shown} in the ledger, of {by_events} by its events")
    elif shown is not None and group.HasField("batch_index"):
        place = ledger.replay.steps.batches[shown].index(group.group_id)
        if place != group.batch_index:
            yield Finding(
                "order",
                f"group {group.group_id} is number {group.batch_index} of step {shown}'s batch in the ledger, "
                f"{place} by its events",
            )


def _compare_counts(ledger: AuditedLedger, stats: pb.StreamStats) -> Iterator[Finding]:
    replay, steps = ledger.replay, ledger.replay.steps
    counts = {state_name(state): number for state, number in replay.counts().items() if number}
    shown = {name: number for name, number in stats.groups.items() if number}
    if counts != shown:
        yield Finding("count", f"the ledger counts the groups {_sorted(shown)}, its events {_sorted(counts)}")
    for name, of_events, of_ledger in (
        ("epoch", steps.epoch, stats.epoch),
        ("next step", steps.next_step, stats.step),
        ("policy version", replay.policy_version, stats.policy_version),
    ):
        if of_events != of_ledger:
            yield Finding("count", f"the {name} is {of_ledger} in the ledger, {of_events} by its events")
    for step, used in steps.used.items():
        for group_id in used:
            state = replay.groups[group_id].state
            if state == CONSUMED and step < stats.committed_step:
                yield Finding("count", f"step {step} is committed, and its group {group_id} is CONSUMED still")
            elif state == COMMITTED and step >= stats.committed_step:
                yield Finding("count", f"group {group_id} of step {step} is COMMITTED, the step is not")


def _sorted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"
