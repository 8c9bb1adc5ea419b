"""One corruption at a time, planted in a good run's ledger or record: the audit names each by its class and its ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.api.sample.v1 import sample_pb2
from headrace.ledger_tools.audit_run import audit_ledger, described
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.state import LedgerEvent
from tests.support.ledgers.audited_run import STREAM, AuditedRun, good_run, run_with_drops
from tests.support.processes.buffer_server import served_buffer

Plant = Callable[[AuditedRun], Sequence[str]]
"""Spoils a run; regular expressions of lines that the audit has to print."""

PLANTED: dict[str, Plant] = {}


def planted(plant: Plant) -> Plant:
    PLANTED[plant.__name__] = plant
    return plant


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> AuditedRun:
    return asyncio.run(good_run(tmp_path_factory.mktemp("good")))


async def said_of(run: AuditedRun, folder: Path) -> str:
    """What `headrace audit --deep` prints."""
    record = folder / "spoiled.jsonl"
    record.write_text("".join(line + "\n" for line in run.record))
    async with served_buffer(run.store) as (_, server):
        return described(await audit_ledger(server.address, STREAM, record, 30.0, deep=True))


async def test_a_good_run_is_clean(good: AuditedRun, tmp_path: Path) -> None:
    first, *rest = (await said_of(good.copied(), tmp_path)).splitlines()
    assert rest == ["lost, doubled, unaccounted: 0 0 0"]
    assert first.startswith("6 steps were fed 24 samples")
    assert first.endswith("18 payloads are as they were put")


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_corruption_is_named(good: AuditedRun, tmp_path: Path, name: str) -> None:
    run = good.copied()
    wanted = PLANTED[name](run)
    lines = (await said_of(run, tmp_path)).splitlines()[2:]
    assert wanted
    for pattern in wanted:
        assert any(re.search(pattern, line) for line in lines), f"no line matches {pattern!r} in\n" + "\n".join(lines)


# Groups that an operator dropped


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> AuditedRun:
    return asyncio.run(run_with_drops(tmp_path_factory.mktemp("dropped")))


async def test_a_run_with_dropped_groups_and_dissolved_batches_is_clean(dropped: AuditedRun, tmp_path: Path) -> None:
    assert (await said_of(dropped.copied(), tmp_path)).splitlines()[1:] == ["lost, doubled, unaccounted: 0 0 0"]
    assert len(dropped.events("unbatched")) == 3


async def test_a_batch_that_was_dissolved_by_half_is_named(dropped: AuditedRun, tmp_path: Path) -> None:
    run = dropped.copied()
    index = run.events("unbatched")[-1]
    group_id = run.store.events[index].group_id
    event = change(run, index, kind="policy_version", group_id=None, state=None, policy_version=4, step=4)
    said = await said_of(run, tmp_path)
    pattern = rf"^batch: position {event.position - 1} took a group out of the batch of step 4 and left .*{group_id}"
    assert re.search(pattern, said, re.MULTILINE), said


async def test_a_batch_that_was_dissolved_without_a_drop_is_named(dropped: AuditedRun, tmp_path: Path) -> None:
    run = dropped.copied()
    index = run.events("unbatched")[-1]
    event = run.store.events[index]
    change(run, index - 1, kind="policy_version", group_id=None, state=None, policy_version=4, step=4)
    said = await said_of(run, tmp_path)
    pattern = rf"^batch: position {event.position} took group {event.group_id} .* step 4, from which no group was"
    assert re.search(pattern, said, re.MULTILINE), said


async def test_a_step_that_was_fed_neither_its_batch_nor_the_dissolved_one_is_named(
    dropped: AuditedRun, tmp_path: Path
) -> None:
    run = dropped.copied()
    ids = run.rows()[-1]["sample_ids"]
    line_with(run, -1, {"sample_ids": ["another", *ids[1:]]})
    assert re.search("^unaccounted: another$", await said_of(run, tmp_path), re.MULTILINE)


async def test_a_step_that_was_consumed_and_not_fed_its_new_batch_is_named(dropped: AuditedRun, tmp_path: Path) -> None:
    run = dropped.copied()
    rows = run.rows()
    old, new = (next(r for r in order if r["step"] == 2) for order in (rows, rows[::-1]))
    assert old["sample_ids"] != new["sample_ids"]
    line_with(run, rows.index(new), {"sample_ids": old["sample_ids"], "digest": old["digest"]})
    said = await said_of(run, tmp_path)
    lost = [each for each in new["sample_ids"] if each not in old["sample_ids"]]
    assert lost
    assert all(f"lost: {each}" in said.splitlines() for each in lost), said


# The history


def change(run: AuditedRun, index: int, **fields: Any) -> LedgerEvent:
    run.store.events[index] = replace(run.store.events[index], **fields)
    return run.store.events[index]


@planted
def an_event_is_gone(run: AuditedRun) -> Sequence[str]:
    event = run.store.events.pop(run.events("put")[3])
    return [rf"^history: .* {event.position} to {event.position}\b"]


@planted
def many_events_are_gone(run: AuditedRun) -> Sequence[str]:
    first = run.store.events[40].position
    del run.store.events[40:50]
    return [rf"^history: .* {first} to {first + 9}\b"]


@planted
def a_step_consumed_other_samples_than_were_put(run: AuditedRun) -> Sequence[str]:
    index = run.events("consumed")[-1]
    ids = run.store.events[index].sample_ids
    event = change(run, index, sample_ids=("nobody's", *ids[1:]))
    return [rf"^batch: position {event.position} consumed the samples .*nobody's.* of group {event.group_id}"]


@planted
def a_step_was_passed_over(run: AuditedRun) -> Sequence[str]:
    last = run.store.events[run.events("consumed")[-1]].step
    for index in [i for i in run.events("consumed") if run.store.events[i].step == last]:
        change(run, index, step=last + 1)
    return [rf"^epoch: position \d+ consumed step {last + 1}, the next was {last}"]


@planted
def a_group_was_given_to_two_steps(run: AuditedRun) -> Sequence[str]:
    first, *_, last = run.events("batched")
    group_id = run.store.events[first + 2].group_id
    event = change(run, last, group_id=group_id)
    return [rf"position {event.position} .*group {group_id}\b"]


@planted
def a_rewind_forgot_a_group(run: AuditedRun) -> Sequence[str]:
    index = next(i for i in run.events("rewound") if run.store.events[i].group_id)
    group_id = run.store.events[index].group_id
    change(run, index, kind="policy_version", group_id=None, state=None)
    return [rf"^batch: position \d+ went back to step 1 and left the groups .*{group_id}"]


@planted
def a_group_was_put_short_of_a_sample(run: AuditedRun) -> Sequence[str]:
    index = run.events("put")[-1]
    ids = run.store.events[index].sample_ids
    event = change(run, index, sample_ids=ids[:1])
    return [rf"^count: position {event.position} put 1 samples of 2 for group {event.group_id}"]


@planted
def a_sample_was_put_for_two_groups(run: AuditedRun) -> Sequence[str]:
    first, *_, last = run.events("put")
    sample_id = run.store.events[first].sample_ids[0]
    event = change(run, last, sample_ids=(sample_id, run.store.events[last].sample_ids[1]))
    return [rf"^state: position {event.position} put sample {sample_id} of .* for {event.group_id}"]


@planted
def the_policy_version_went_back(run: AuditedRun) -> Sequence[str]:
    first, second, *_ = run.events("policy_version")
    change(run, first, policy_version=9)
    event = run.store.events[second]
    return [rf"^version: position {event.position} set version {event.policy_version} after 9"]


EVENTS: dict[str, tuple[str, int, GroupState | None, dict[str, Any], str]] = {
    "an event is of an unknown kind": (
        "released", 1, None, {"kind": "evaporated"},
        r"^history: position {position} is of the unknown kind 'evaporated', of group {group_id}",
    ),
    "a group was committed and never consumed": (
        "committed", -1, GroupState.READY, {}, r"^state: position {position} committed group {group_id}\b",
    ),
    "a group was put without a lease": (
        "put", -1, GroupState.QUEUED, {}, "^state: position {position} put took group {group_id} from QUEUED to READY",
    ),
    "a dropped group was consumed": (
        "consumed", -1, GroupState.DROPPED, {},
        "^state: position {position} consumed took group {group_id} from DROPPED to CONSUMED",
    ),
    "a stale group was trained": (
        "batched", -1, None, {"policy_version": 2},
        "^version: position {position} gave group {group_id} of version 2 to step 5",
    ),
    "epochs overlap": ("batched", -1, None, {"epoch": 1}, "^epoch: position {position} is of epoch 1, after epoch 3"),
    "an epoch was opened by nobody": (
        "policy_version", 0, None, {"epoch": 7},
        "^epoch: position {position} is of epoch 7, which no rewind has opened",
    ),
    "a batch was short": (
        "batched", -1, None,
        {"kind": "policy_version", "group_id": None, "state": None, "policy_version": 5, "step": 5},
        "^batch: position {before} left step 5 with 1 groups, a batch has 2",
    ),
}  # fmt: skip
"""By what it is: (kind of the event, which of them, a group of which state it names then, other changes, the line)."""


@pytest.mark.parametrize("name", EVENTS)
async def test_a_changed_event_is_named(good: AuditedRun, tmp_path: Path, name: str) -> None:
    kind, which, state, fields, pattern = EVENTS[name]
    run = good.copied()
    if state is not None:
        fields = {**fields, "group_id": run.groups(state)[0].group_id}
    event = change(run, run.events(kind)[which], **fields)
    wanted = pattern.format(position=event.position, before=event.position - 1, group_id=event.group_id)
    said = await said_of(run, tmp_path)
    assert re.search(wanted, said, re.MULTILINE), said


# What the ledger shows


@planted
def a_ready_group_is_gone(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.READY)[-1]
    del run.store.groups[group.group_id]
    return [f"^lost: {record.sample_id}$" for record in group.samples]


@planted
def a_committed_group_is_gone(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.COMMITTED)[0]
    del run.store.groups[group.group_id]
    return [f"^lost: {record.sample_id}$" for record in group.samples]


@planted
def a_queued_group_is_gone(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.QUEUED)[0]
    del run.store.groups[group.group_id]
    return [f"^state: group {group.group_id} is QUEUED by its events and not in the ledger"]


def set_group(run: AuditedRun, group: Group, **fields: Any) -> str:
    run.store.groups[group.group_id] = replace(group, **fields)
    return group.group_id


@planted
def a_committed_group_has_risen_again(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.COMMITTED)[0]
    group_id = set_group(run, group, state=GroupState.QUEUED, samples=(), step=None, batch_index=None)
    return [rf"^state: group {group_id} is QUEUED .* by its events COMMITTED", f"^lost: {group.samples[0].sample_id}$"]


@planted
def a_group_is_of_another_step(run: AuditedRun) -> Sequence[str]:
    group_id = set_group(run, run.groups(GroupState.READY)[0], step=None, batch_index=None)
    return [rf"^batch: group {group_id} is of step None in the ledger, of 5 by its events"]


@planted
def a_group_came_from_nowhere(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.QUEUED)[0]
    run.store.groups["train/99"] = replace(group, group_id="train/99", prompt=replace(group.prompt, prompt_id="new"))
    return [r"^state: group train/99 is in the ledger and no event made it"]


@planted
def a_groups_samples_stand_in_another_order(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.CONSUMED)[0]
    set_group(run, group, samples=group.samples[::-1])
    return [rf"^state: group {group.group_id} shows the samples", r"^digest: line \d+ feeds step"]


@planted
def a_sample_has_another_digest(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.COMMITTED)[0]
    records = (replace(group.samples[0], digest=group.samples[1].digest), *group.samples[1:])
    envelope = bytearray(group.samples[0].envelope)
    at = envelope.index(group.samples[0].digest)
    envelope[at : at + len(group.samples[1].digest)] = group.samples[1].digest
    set_group(run, group, samples=(replace(records[0], envelope=bytes(envelope)), *records[1:]))
    return [rf"^digest: line \d+ feeds step {group.step} the batch"]


@planted
def a_sample_has_another_reward(run: AuditedRun) -> Sequence[str]:
    group = run.groups(GroupState.COMMITTED)[0]
    envelope = sample_pb2.SampleEnvelope.FromString(group.samples[0].envelope)
    envelope.reward = 0.0
    set_group(run, group, samples=(replace(group.samples[0], envelope=envelope.SerializeToString()), group.samples[1]))
    return [rf"^digest: line \d+ feeds step {group.step} the batch"]


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "the epoch went back": ({"epoch": 1}, "^count: the epoch is 1 in the ledger, 3 by its events"),
    "the next step is another": ({"step": 7}, "^count: the next step is 7 in the ledger, 5 by its events"),
    "more is committed": (
        {"committed_step": 4},
        "^count: step 2 is committed, and its group train/6 is CONSUMED still",
    ),
    "less is committed": ({"committed_step": 1}, "^count: group train/4 of step 1 is COMMITTED, the step is not"),
    "groups are not there": (
        {"forgotten": {"COMMITTED": 3}},
        "^count: the ledger counts the groups COMMITTED 7, .* its events COMMITTED 4",
    ),
}


@pytest.mark.parametrize("name", STATES)
async def test_a_changed_stream_is_named(good: AuditedRun, tmp_path: Path, name: str) -> None:
    fields, pattern = STATES[name]
    run = good.copied()
    run.store.streams[STREAM] = replace(run.store.streams[STREAM], **fields)
    said = await said_of(run, tmp_path)
    assert re.search(pattern, said, re.MULTILINE), said


# Payloads


def spoil_payload(run: AuditedRun, spoil: Callable[[bytes], bytes]) -> str:
    record = run.groups(GroupState.READY)[-1].samples[1]
    run.store.payloads[record.key] = spoil(run.store.payloads[record.key])
    return record.sample_id


@planted
def a_bit_of_a_payload_is_another(run: AuditedRun) -> Sequence[str]:
    return [f"^payload: of sample {spoil_payload(run, lambda data: data[:-1] + bytes([data[-1] ^ 1]))} "]


@planted
def a_payload_is_cut(run: AuditedRun) -> Sequence[str]:
    return [f"^payload: of sample {spoil_payload(run, lambda data: data[:-3])} "]


@planted
def a_payload_is_gone(run: AuditedRun) -> Sequence[str]:
    record = run.groups(GroupState.CONSUMED)[0].samples[0]
    del run.store.payloads[record.key]
    return [f"^payload: of sample {record.sample_id} "]


@planted
def two_payloads_are_swapped(run: AuditedRun) -> Sequence[str]:
    one, other = run.groups(GroupState.READY)[0].samples
    payloads = run.store.payloads
    payloads[one.key], payloads[other.key] = payloads[other.key], payloads[one.key]
    return [f"^payload: of sample {each.sample_id} " for each in (one, other)]


# The trainer's record: lines 0 1 2 3 | 1 2 3 | 4 5


def line_with(run: AuditedRun, index: int, changes: Mapping[str, Any]) -> None:
    rows = run.rows()
    rows[index].update(changes)
    run.set_rows(rows)


LINES: dict[str, tuple[int, dict[str, Any] | str, str]] = {
    "another batch by its digest": (7, {"digest": "ab" * 32}, "^digest: line 8 feeds step 4 the batch abababab"),
    "another digest before a rewind": (2, {"digest": "cd" * 32}, "^digest: lines 3 and 6 feed step 2"),
    "another shape": (7, '{"step": 4}', "^record: line 8 (.|\n)*^record: has no line of step 4"),
    "a list": (7, '[{"step": 4}]', "^record: line 8 "),
    "a text for a step": (7, {"step": "4"}, "^record: line 8 .*step"),
    "samples that are none": (7, {"sample_ids": [1, 2, None, {}]}, "^record: line 8 "),
}


@pytest.mark.parametrize("name", LINES)
async def test_a_changed_line_is_named(good: AuditedRun, tmp_path: Path, name: str) -> None:
    index, changed, pattern = LINES[name]
    run = good.copied()
    if isinstance(changed, str):
        run.record[index] = changed
    else:
        line_with(run, index, changed)
    said = await said_of(run, tmp_path)
    assert re.search(pattern, said, re.MULTILINE), said


@planted
def a_step_was_fed_in_another_order(run: AuditedRun) -> Sequence[str]:
    ids = run.rows()[7]["sample_ids"]
    line_with(run, 7, {"sample_ids": [ids[1], ids[0], *ids[2:]]})
    return [rf"^order: line 8 feeds step 4 .*{ids[1]}, in the ledger {ids[0]}"]


@planted
def a_step_was_fed_other_samples_before_a_rewind(run: AuditedRun) -> Sequence[str]:
    ids = run.rows()[2]["sample_ids"]
    line_with(run, 2, {"sample_ids": ["another", *ids[1:]]})
    return [rf"^rerun: step 2 .*line 3 has \['another'\], line 6 has \['{ids[0]}'\]"]


@planted
def a_step_was_fed_in_another_order_before_a_rewind(run: AuditedRun) -> Sequence[str]:
    line_with(run, 2, {"sample_ids": run.rows()[2]["sample_ids"][::-1]})
    return [r"^rerun: step 2 .*, in another order"]


@planted
def a_line_is_gone(run: AuditedRun) -> Sequence[str]:
    row = run.rows()[7]
    del run.record[7]
    return [
        r"^record: has no line of step 4, which epoch 3 consumed",
        *(f"^lost: {each}$" for each in row["sample_ids"]),
    ]


@planted
def a_line_of_an_earlier_run_is_gone(run: AuditedRun) -> Sequence[str]:
    del run.record[1]
    return [r"^record: has no line of step 1, which epoch 1 consumed before line 2"]


@planted
def a_line_stands_twice(run: AuditedRun) -> Sequence[str]:
    run.record.insert(3, run.record[2])
    return [r"^record: line \d+ feeds step [23] "]


@planted
def two_lines_are_swapped(run: AuditedRun) -> Sequence[str]:
    run.record[1], run.record[2] = run.record[2], run.record[1]
    return [r"^record: line 2 feeds step 2 where epoch 1 consumed step 1 next"]


@planted
def a_line_is_garbage(run: AuditedRun) -> Sequence[str]:
    run.record.insert(2, "%PDF-1.4 what is this")
    return [r"^record: line 3 .*%PDF"]


@planted
def a_step_was_fed_that_nobody_gave(run: AuditedRun) -> Sequence[str]:
    rows = run.rows()
    run.set_rows([*rows, {**rows[-1], "step": 6, "sample_ids": ["x"]}])
    return [r"^record: line 10 feeds step 6 after step 4", "^unaccounted: x$"]


@planted
def a_sample_was_trained_in_two_steps(run: AuditedRun) -> Sequence[str]:
    rows = run.rows()
    line_with(run, 7, {"sample_ids": [*rows[7]["sample_ids"], rows[0]["sample_ids"][0]]})
    return [f"^doubled: {rows[0]['sample_ids'][0]}$", f"^unaccounted: {rows[0]['sample_ids'][0]}$"]


@planted
def a_sample_of_an_expired_group_was_trained(run: AuditedRun) -> Sequence[str]:
    event = run.store.events[run.events("expired")[0] - 1]
    line_with(run, 7, {"sample_ids": [*run.rows()[7]["sample_ids"], event.sample_ids[0]]})
    return [f"^unaccounted: {event.sample_ids[0]}$"]


@planted
def a_sample_was_not_trained(run: AuditedRun) -> Sequence[str]:
    ids = run.rows()[7]["sample_ids"]
    line_with(run, 7, {"sample_ids": ids[1:]})
    return [f"^lost: {ids[0]}$", r"^batch: of step 4 was fed without"]


@planted
def a_step_that_was_not_consumed_was_fed_in_part(run: AuditedRun) -> Sequence[str]:
    ids = run.rows()[8]["sample_ids"]
    line_with(run, 8, {"sample_ids": ids[:-1]})
    return [rf"^batch: of step 5 was fed without \['{ids[-1]}'\] \(line 9\)"]
