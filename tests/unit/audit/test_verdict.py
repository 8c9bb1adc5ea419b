"""The verdict over histories and records made by hand."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.audit.history import History
from headrace.audit.record import fed_steps
from headrace.audit.verdict import Verdict, judge, judge_shards

READY, CONSUMED, COMMITTED, QUEUED = (
    pb.GROUP_STATE_READY,
    pb.GROUP_STATE_CONSUMED,
    pb.GROUP_STATE_COMMITTED,
    pb.GROUP_STATE_QUEUED,
)
KEPT = {"g0": ("a", "b"), "g1": ("c", "d")}


def history(*events: tuple[str, str, pb.GroupState.ValueType, int | None, tuple[str, ...]]) -> History:
    made = History()
    for position, (kind, group_id, state, step, sample_ids) in enumerate(events, 1):
        made.add(
            pb.LedgerEvent(
                position=position, kind=kind, group_id=group_id, state=state, step=step, sample_ids=sample_ids, epoch=1
            )
        )
    return made


def two_steps() -> History:
    return history(
        ("put", "g0", READY, None, ("a", "b")),
        ("put", "g1", READY, None, ("c", "d")),
        ("batched", "g0", READY, 0, ()),
        ("consumed", "g0", CONSUMED, 0, ("a", "b")),
        ("batched", "g1", READY, 1, ()),
        ("consumed", "g1", CONSUMED, 1, ("c", "d")),
    )


def test_a_run_as_it_should_be_is_clean() -> None:
    assert judge(two_steps(), KEPT, {0: ["b", "a"], 1: ["c", "d"]}).is_clean


def test_what_the_trainer_was_not_fed_is_lost() -> None:
    assert judge(two_steps(), KEPT, {0: ["a"], 1: ["c", "d"]}) == Verdict(["b"], [], [])
    assert judge(two_steps(), KEPT, {1: ["c", "d"]}) == Verdict(["a", "b"], [], [])


def test_what_the_ledger_no_longer_shows_is_lost() -> None:
    fed = {0: ["a", "b"], 1: ["c", "d"]}
    assert judge(two_steps(), {"g1": ("c", "d")}, fed) == Verdict(["a", "b"], [], [])
    assert judge(two_steps(), {**KEPT, "g1": ("c",)}, fed) == Verdict(["d"], [], [])


def test_the_ledger_may_forget_what_is_committed() -> None:
    done = two_steps()
    done.add(pb.LedgerEvent(position=7, kind="committed", group_id="g0", state=COMMITTED, step=0))
    assert judge(done, {"g1": ("c", "d")}, {0: ["a", "b"], 1: ["c", "d"]}).is_clean


def test_what_went_into_two_steps_is_doubled() -> None:
    assert judge(two_steps(), KEPT, {0: ["a", "b"], 1: ["c", "d", "a"]}) == Verdict([], ["a"], ["a"])
    twice = two_steps()
    twice.add(pb.LedgerEvent(position=7, kind="consumed", group_id="g0", state=CONSUMED, step=1, sample_ids=["a", "b"]))
    assert judge(twice, KEPT, {0: ["a", "b"], 1: ["c", "d"]}).doubled == ["a", "b"]


def test_what_the_ledger_never_gave_is_unaccounted() -> None:
    assert judge(two_steps(), KEPT, {0: ["a", "b", "x"], 1: ["c", "d"]}) == Verdict([], [], ["x"])


def test_a_step_fed_and_not_yet_consumed_has_to_be_the_ledgers_batch() -> None:
    ahead = history(("put", "g0", READY, None, ("a", "b")), ("batched", "g0", READY, 0, ()))
    assert judge(ahead, {"g0": ("a", "b")}, {0: ["a", "b"]}).is_clean
    assert judge(ahead, {"g0": ("a", "b")}, {0: ["a", "x"]}) == Verdict([], [], ["x"])


def test_samples_given_up_are_not_lost_and_a_rewound_step_is_not_doubled() -> None:
    made = two_steps()
    made.add(pb.LedgerEvent(position=7, kind="rewound", group_id="g1", state=READY, step=1))
    made.add(pb.LedgerEvent(position=8, kind="consumed", group_id="g1", state=CONSUMED, step=1, sample_ids=["c", "d"]))
    made.add(pb.LedgerEvent(position=9, kind="put", group_id="g2", state=READY, sample_ids=["e", "f"]))
    made.add(pb.LedgerEvent(position=10, kind="expired", group_id="g2", state=QUEUED))
    assert judge(made, {**KEPT, "g2": ()}, {0: ["a", "b"], 1: ["c", "d"]}).is_clean


def test_the_last_whole_line_of_a_step_counts() -> None:
    lines = [
        '{"step": 0, "sample_ids": ["a"]}',
        '{"step": 1, "sample_ids": ["x"]}',
        '{"step": 2, "sample_ids": ["c"]}',
        '{"step": 1, "sample_ids": ["b"]}',
        '{"step": 2, "sampl',
    ]
    assert fed_steps(lines) == {0: ["a"], 1: ["b"], 2: ["c"]}


def test_shards_are_judged_each_by_its_own_part_also_where_one_is_behind() -> None:
    ahead = history(
        ("put", "g0", READY, None, ("a", "b")),
        ("batched", "g0", READY, 0, ()),
        ("consumed", "g0", CONSUMED, 0, ("a", "b")),
    )
    behind = history(("put", "g1", READY, None, ("c", "d")), ("batched", "g1", READY, 0, ()))
    shards = [(ahead, {"g0": ("a", "b")}), (behind, {"g1": ("c", "d")})]
    assert judge_shards(shards, {0: ["a", "b", "c", "d"]}).is_clean
    assert judge_shards(shards, {0: ["a", "c", "d", "x"]}) == Verdict(["b"], [], ["x"])
    assert judge_shards(shards, {0: ["a", "b", "c", "d"], 1: ["d"]}).doubled == ["d"]
