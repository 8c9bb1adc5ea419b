"""The verdict over histories and records made by hand, and the lines of a record that a kill may have cut."""

from __future__ import annotations

import hashlib
import json

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.ledger_tools.audit import (
    COMMITTED,
    CONSUMED,
    LEASED,
    QUEUED,
    READY,
    AuditedLedger,
    Record,
    Replay,
    State,
    parse_record,
    verdict_of,
)

NO_STATE = pb.GROUP_STATE_UNSPECIFIED


class Shard:
    """One buffer's events, put down one by one."""

    def __init__(self, groups_per_step: int = 1) -> None:
        config = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=groups_per_step)
        self.replay, self.epoch, self.position = Replay(config), 0, 0

    def add(self, kind: str, group_id: str = "", state: State = NO_STATE, step: int | None = None, *ids: str) -> None:
        self.position += 1
        self.replay.add(
            pb.LedgerEvent(
                position=self.position,
                kind=kind,
                group_id=group_id,
                state=state,
                step=step,
                sample_ids=ids,
                epoch=self.epoch,
            )
        )

    def begin(self, step: int, *back: tuple[str, int]) -> None:
        self.epoch += 1
        for group_id, of in back:
            self.add("rewound", group_id, READY, of)
        self.add("rewound", "", NO_STATE, step)

    def put(self, group_id: str, step: int, *ids: str) -> None:
        for kind, state in (("submitted", QUEUED), ("leased", LEASED)):
            self.add(kind, group_id, state)
        self.add("put", group_id, READY, None, *ids)
        self.add("batched", group_id, READY, step)

    def consume(self, group_id: str, step: int) -> None:
        self.add("consumed", group_id, CONSUMED, step, *self.replay.groups[group_id].sample_ids)

    def ledger(self, *, without: tuple[str, ...] = ()) -> AuditedLedger:
        self.replay.finish()
        groups = {
            story.group_id: pb.Group(
                group_id=story.group_id,
                state=story.state,
                position=story.position,
                step=self.replay.steps.step_of(story.group_id),
                samples=[sample_pb2.SampleEnvelope(sample_id=each, digest=b"d") for each in story.sample_ids],
            )
            for story in self.replay.groups.values()
            if story.group_id not in without
        }
        return AuditedLedger(self.replay, self.position, groups, None)


def digest(*parts: tuple[str, int]) -> bytes:
    """Of one shard's groups, each with so many samples."""
    return hashlib.sha256(b"".join(group_id.encode() + b"d" * number for group_id, number in parts)).digest()


def record(*lines: tuple[int, bytes, str]) -> Record:
    """(step, digest, sample ids by their letters)."""
    return parse_record(
        json.dumps({"step": step, "digest": each.hex(), "sample_ids": list(ids)}).encode() for step, each, ids in lines
    )


ZERO, ONE = digest(("g0", 2)), digest(("g1", 2))


def two_steps() -> Shard:
    shard = Shard()
    shard.begin(0)
    shard.put("g0", 0, "a", "b")
    shard.put("g1", 1, "c", "d")
    shard.consume("g0", 0)
    shard.consume("g1", 1)
    return shard


def test_a_ledger_without_a_line_of_the_trainer_has_lost_all() -> None:
    verdict = verdict_of([two_steps().ledger()], Record())
    assert verdict.lost == ["a", "b", "c", "d"]
    assert [each.what for each in verdict.others] == [
        "has no line of step 0, which epoch 1 consumed",
        "has no line of step 1, which epoch 1 consumed",
    ]


def test_what_retention_has_forgotten_is_not_missed_and_what_it_has_not_is() -> None:
    shard = two_steps()
    shard.add("committed", "g0", COMMITTED, 0)
    fed = record((0, ZERO, "ab"), (1, ONE, "cd"))
    assert verdict_of([shard.ledger(without=("g0",))], fed).lost == ["a", "b"]
    shard.add("forgotten", "", NO_STATE, 1)
    assert verdict_of([shard.ledger(without=("g0",))], fed).is_clean


def test_an_older_trainer_may_write_its_last_line_late_but_only_one() -> None:
    shard = two_steps()
    shard.begin(1, ("g1", 1))
    shard.consume("g1", 1)
    shard.put("g2", 2, "e", "f")
    shard.consume("g2", 2)
    lines = [(0, ZERO, "ab"), (1, ONE, "cd"), (1, ONE, "cd"), (2, digest(("g2", 2)), "ef")]
    late = (2, digest(("g2", 2)), "ef")
    assert verdict_of([shard.ledger()], record(*lines)).is_clean
    assert verdict_of([shard.ledger()], record(*lines, late)).is_clean
    assert not verdict_of([shard.ledger()], record(*lines, late, late)).is_clean


def test_a_trainers_checkpoint_may_pass_a_step_that_it_did_not_consume() -> None:
    shard = Shard()
    shard.begin(0)
    shard.put("g0", 0, "a", "b")
    shard.epoch += 1
    shard.consume("g0", 0)
    shard.add("rewound", "", NO_STATE, 1)
    assert verdict_of([shard.ledger()], record((0, ZERO, "ab"))).is_clean


def test_a_group_taken_out_of_a_batch_explains_why_a_rerun_has_another() -> None:
    shard = Shard()
    shard.begin(0)
    shard.put("g0", 0, "a", "b")
    shard.begin(0)
    shard.add("dropped", "g0", pb.GROUP_STATE_DROPPED, 0)
    shard.put("g1", 0, "c", "d")
    shard.consume("g1", 0)
    assert verdict_of([shard.ledger()], record((0, ZERO, "ab"), (0, ONE, "cd"))).is_clean
    assert verdict_of([shard.ledger()], record((0, ZERO, "ax"), (0, ONE, "cd"))).others[0].kind == "rerun"


def test_lines_that_came_while_the_ledger_was_read_are_not_held_against_it() -> None:
    lines = ((0, ZERO, "ab"), (1, ONE, "cd"), (2, ZERO, "xy"), (3, ZERO, "zz"))
    assert verdict_of([two_steps().ledger()], record(*lines), num_lines_before=2).is_clean
    assert not verdict_of([two_steps().ledger()], record(*lines)).is_clean


def shards() -> list[AuditedLedger]:
    """One has consumed step 0, a kill has kept the other from it."""
    ahead, behind = Shard(), Shard()
    for shard, group_id, ids in ((ahead, "g0", "ab"), (behind, "g1", "cd")):
        shard.begin(0)
        shard.put(group_id, 0, *ids)
    ahead.consume("g0", 0)
    return [ahead.ledger(), behind.ledger()]


def test_shards_are_judged_together_also_where_one_is_behind() -> None:
    whole = hashlib.sha256(ZERO + ONE).digest()
    assert verdict_of(shards(), record((0, whole, "abcd"))).is_clean
    assert [each.kind for each in verdict_of(shards(), record((0, ZERO, "abcd"))).others] == ["digest"]
    assert [each.kind for each in verdict_of(shards(), record((0, whole, "cdab"))).others] == ["order"]
    verdict = verdict_of(shards(), record((0, whole, "acdx")))
    assert (verdict.lost, verdict.unaccounted) == (["b"], ["x"])
    assert verdict_of(shards(), record((0, whole, "abcd"), (1, whole, "d"))).doubled == ["d"]


def line(step: int, *sample_ids: str) -> bytes:
    return json.dumps({"step": step, "digest": "ab" * 32, "sample_ids": sample_ids}).encode() + b"\n"


def test_the_last_whole_line_of_a_step_counts() -> None:
    record = parse_record([line(0, "a"), line(1, "x"), line(2, "c"), line(1, "b"), line(2, "ü")[:-20] + b"\n"])
    assert {step: list(each.sample_ids) for step, each in record.last_lines.items()} == {0: ["a"], 1: ["b"], 2: ["c"]}
    assert not record.findings


def test_wherever_a_kill_cuts_a_line_it_is_passed_over() -> None:
    whole = line(12, 'a "quoted" one', "ünïcode/0")
    for end in range(len(whole) - 1):
        for rest in (b"", b"\n"):
            record = parse_record([line(0, "a"), whole[:end] + rest])
            assert not record.findings, whole[:end]
            assert len(record.lines) == 1
    assert not parse_record([line(0, "a"), b"\0" * 40]).findings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"hello", "is not as the trainer writes it"),
        (b'{"step": 1, xx "digest": "ab"}', "is not as the trainer writes it"),
        (b'\xff\xfe{"step": 1', "is not as the trainer writes it"),
        (b"[" * 100_000, "is not as the trainer writes it"),
        (b'{"step": -1}', "$.step"),
        (line(1, "a").replace(b"ab" * 32, b"ab" * 31), "$.digest"),
        (line(1), "$.sample_ids"),
    ],
)
def test_a_line_of_another_shape_is_named_by_its_number(text: bytes, why: str) -> None:
    record = parse_record([line(0, "a"), text + b"\n", line(1, "b")])
    (finding,) = record.findings
    assert finding.kind == "record"
    assert finding.what.startswith("line 2 is not as the trainer writes it")
    assert why in finding.what
    assert len(finding.what) < 200
    assert [each.step for each in record.lines] == [0, 1]
