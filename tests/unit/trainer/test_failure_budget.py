"""When a run that cannot learn is ended, and what it says then."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.job.schema.production import RolloutSection
from services.trainer.failure_budget import FailureBudget


def reading(num_good: int, failed: dict[str, int], dropped: int = 0, *, epoch: int = 1) -> pb.StreamStats:
    """What the buffer counts: good samples, failed ones by reason, and dropped ones."""
    failures = [
        pb.FailureCount(reason=reason, num_samples=count, example=f"{reason}'s example", group_id="train/7")
        for reason, count in failed.items()
    ]
    if dropped:
        failures.append(pb.FailureCount(reason="PROMPT_TOO_LONG", num_samples=dropped, example="9 tokens"))
    num_failed = sum(failed.values())
    production = pb.Production(
        num_samples=num_good + num_failed + dropped,
        num_failed=num_failed,
        num_dropped=dropped,
        failures=sorted(failures, key=lambda count: -count.num_samples),
    )
    return pb.StreamStats(epoch=epoch, production=production)


def verdicts(budget: FailureBudget, *readings: pb.StreamStats) -> list[str | None]:
    return [budget.verdict(one) for one in readings]


def test_a_run_of_which_most_samples_fail_ends_with_the_three_most_frequent_reasons_counts_and_examples() -> None:
    verdict = FailureBudget(0.5, 100).verdict(reading(10, {"A": 50, "B": 30, "C": 7, "D": 2, "E": 1}))
    assert verdict is not None
    lines = verdict.splitlines()
    assert lines[0] == "90 of the last 100 samples failed, more than --max-failed-share 0.5 allows:"
    assert lines[1:] == [
        "  50 A: A's example (e.g. group train/7)",
        "  30 B: B's example (e.g. group train/7)",
        "  7 C: C's example (e.g. group train/7)",
        "  3 for other reasons",
    ]


def test_a_share_at_the_bound_and_too_few_samples_to_judge_by_end_nothing() -> None:
    assert verdicts(FailureBudget(0.5, 100), reading(0, {"A": 99}), reading(99, {"A": 99})) == [None, None]


def test_only_the_latest_samples_count() -> None:
    healthy_for_long = reading(10_000, {})
    assert verdicts(FailureBudget(0.5, 100), healthy_for_long, reading(10_010, {"A": 60})) == [None, None]
    budget = FailureBudget(0.5, 100)
    *_, last = verdicts(budget, healthy_for_long, reading(10_010, {"A": 60}), reading(10_010, {"A": 110}))
    assert last is not None
    assert last.startswith("110 of the last 120 samples failed")


def test_a_buffer_that_starts_again_counts_from_0() -> None:
    budget = FailureBudget(0.5, 100)
    assert verdicts(budget, reading(400, {}), reading(60, {"A": 30}), reading(70, {"A": 50})) == [None] * 3
    assert budget.verdict(reading(70, {"A": 150})) is not None


def test_filters_may_drop_most_groups_but_not_all_of_very_many() -> None:
    assert FailureBudget(0.5, 100).verdict(reading(1, {}, dropped=5_000)) is None
    assert verdicts(FailureBudget(1.0, 10), reading(0, {"A": 10_000}), reading(0, {}, dropped=10_000)) == [None, None]
    verdict = FailureBudget(0.5, 100).verdict(reading(0, {}, dropped=1_000))
    assert verdict is not None
    assert verdict.startswith("not one of the last 1000 samples could be used:\n  1000 PROMPT_TOO_LONG: 9 tokens")


def test_the_window_is_a_steps_samples_and_32_at_least(load_with) -> None:
    job = load_with("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--global-batch-size", "64")
    assert FailureBudget.of(job.rollout).verdict(reading(0, {"A": 127})) is None
    assert FailureBudget.of(job.rollout).verdict(reading(0, {"A": 128})) is not None
    small = RolloutSection(rollout_batch_size=2, n_samples_per_prompt=2, max_failed_share=0.9)
    assert FailureBudget.of(small).verdict(reading(0, {"A": 32})) is not None
