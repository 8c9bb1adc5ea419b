"""Cutting a rollout batch: nothing dropped, alike on every rank, balanced, and within the tokens of a rank."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.job.schema.training import TrainSection
from headrace.models.registry import architecture, read_architecture
from headrace.trajectory import Status
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import ModelFlops, Planner, StepPlan, cost_of
from services.trainer.plan.rows import Packing, row_tokens
from services.trainer.rl.algorithms.numerics import Reduction
from tests.support.models.tiny_families import make_tiny, tiny_config
from tests.support.slime_micro_batches import slime_cut

PACKINGS = get_args(Packing)
LENGTHS = st.lists(st.integers(1, 400), min_size=0, max_size=40)


def facts(number: int, length: int, status: Status = Status.COMPLETED, prompt: int = 2) -> SampleFacts:
    return SampleFacts(
        sample_id=f"s{number:03d}",
        group_id=f"g{number // 4}",
        rollout_id=f"s{number:03d}",
        reward=1.0,
        status=status.value,
        prompt_length=prompt,
        response_length=length,
        trained_tokens=length,
        min_policy_version=0,
    )


def tokens(sample: SampleFacts) -> int:
    return sample.prompt_length + sample.response_length


def planner(
    dp_size: int = 1,
    packing: Packing = "padded",
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    cost: Callable[[SampleFacts], int] | None = tokens,
    multiple_of: int = 1,
) -> Planner:
    return Planner(dp_size, packing, micro_batch_size, max_tokens, cost, multiple_of)


def planned(plans: list[StepPlan], ranks: int) -> list[str]:
    return [i for plan in plans for rank in range(ranks) for ids in plan.micro_batches(rank) for i in ids]


@given(
    LENGTHS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from(PACKINGS), st.booleans(),
    st.one_of(st.none(), st.integers(1, 900)), st.integers(1, 3),
)  # fmt: skip
def test_every_sample_is_in_exactly_one_micro_batch(
    lengths: list[int], steps: int, ranks: int, size: int, packing: Packing, balanced: bool,
    max_tokens: int | None, multiple_of: int,
) -> None:  # fmt: skip
    samples = [facts(i, length) for i, length in enumerate(lengths)]
    cutter = planner(ranks, packing, size, max_tokens, tokens if balanced else None, multiple_of)
    plans = cutter.plan(samples, steps)
    assert len(plans) == steps
    assert sorted(planned(plans, ranks)) == [s.sample_id for s in samples]
    for plan in plans:
        counts = {len(plan.micro_batches(rank)) for rank in range(ranks)}
        assert len(counts) == 1, "data ranks must run equally many collectives"
        assert counts.pop() % multiple_of == 0
        if max_tokens is None:
            assert all(len(ids) <= size for rank in range(ranks) for ids in plan.micro_batches(rank))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from(PACKINGS))
def test_a_dynamic_micro_batch_keeps_to_the_tokens_of_a_rank(lengths: list[int], ranks: int, packing: Packing) -> None:
    by_id = {f"s{i:03d}": facts(i, length, prompt=10) for i, length in enumerate(lengths)}
    (plan,) = planner(ranks, packing, max_tokens=100).plan(list(by_id.values()), 1)
    for rank in range(ranks):
        for ids in plan.micro_batches(rank):
            lengths_of = [(by_id[i].group_id, by_id[i].prompt_length, by_id[i].response_length) for i in ids]
            assert row_tokens(lengths_of, packing) <= 100


@given(LENGTHS, st.integers(1, 3))
def test_steps_keep_the_order_of_the_batch(lengths: list[int], steps: int) -> None:
    samples = [facts(i, length) for i, length in enumerate(lengths)]
    in_order = [sorted(plan.all_sample_ids) for plan in planner(micro_batch_size=4).plan(samples, steps)]
    assert [i for ids in in_order for i in ids] == [s.sample_id for s in samples]


@st.composite
def fan_outs(draw: st.DrawFn) -> list[SampleFacts]:
    """Rollouts of one to five samples, some masked and some failed; those of a rollout need not lie together."""
    found = []
    for number, size in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))):
        for _ in range(size):
            length = draw(st.integers(0, 30))
            status = draw(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.FAILED]))
            sample = facts(len(found), length, status)
            found.append(replace(sample, group_id=f"g{number // 3}", rollout_id=f"r{number % 3}"))
    return draw(st.permutations(found))


@given(fan_outs(), st.integers(1, 4), st.integers(1, 3), st.sampled_from(PACKINGS))
def test_optimizer_steps_are_split_by_rollout_and_weigh_every_token_by_the_closed_form(
    samples: list[SampleFacts], steps: int, ranks: int, packing: Packing
) -> None:
    """A token of a rollout of T trained tokens, in a step of R rollouts: 1 / T / R, masked rollouts counted in R."""
    plans = planner(ranks, packing, micro_batch_size=3).plan(samples, steps)
    alive = [s for s in samples if s.status != Status.FAILED.value]
    tokens_of, step_of, rollouts_of = Counter[tuple[str, str]](), {}, defaultdict[int, set[tuple[str, str]]](set)
    for step, plan in enumerate(plans):
        for sample in (s for s in alive if s.sample_id in plan.all_sample_ids):
            rollout = (sample.group_id, sample.rollout_id)
            assert step_of.setdefault(rollout, step) == step, "a rollout is in two optimizer steps"
            tokens_of[rollout] += sample.trained_tokens
            rollouts_of[step].add(rollout)
    sizes = [len(rollouts_of[step]) for step in range(steps)]
    assert max(sizes) - min(sizes) <= 1
    for step, plan in enumerate(plans):
        reduction = Reduction.of([s for s in samples if s.sample_id in plan.all_sample_ids])
        expected = sum(1 for rollout in rollouts_of[step] if tokens_of[rollout]) / max(len(rollouts_of[step]), 1)
        found = sum(
            reduction.weight(s.sample_id) * s.trained_tokens for s in alive if s.sample_id in plan.all_sample_ids
        )
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
        for sample in (s for s in alive if s.sample_id in plan.all_sample_ids and s.trained_tokens):
            closed = 1 / tokens_of[(sample.group_id, sample.rollout_id)] / len(rollouts_of[step])
            assert reduction.weight(sample.sample_id) == pytest.approx(closed, rel=1e-12)


def lengths_like(name: str, count: int, seed: int, longest: int = 8192) -> list[int]:
    numbers = random.Random(seed)
    draw: dict[str, Callable[[], float]] = {
        "lognormal": lambda: numbers.lognormvariate(6.5, 0.8),
        "bimodal": lambda: numbers.gauss(*numbers.choice([(300, 40), (3500, 300)])),
        "one giant": lambda: numbers.uniform(100, 1000),
    }
    found = [min(max(3, int(draw[name]())), longest) for _ in range(count)]
    return [*found[:-1], longest] if name == "one giant" else found


DISTRIBUTIONS = ["lognormal", "bimodal", "one giant"]


def cut_of(lengths: list[int], ranks: int, packing: Packing, capacity: int) -> tuple[int, list[int]]:
    """Micro-batches of each rank, and the tokens of each; groups have eight samples."""
    samples = [
        replace(facts(i, length - 2), sample_id=str(i), group_id=str(i // 8)) for i, length in enumerate(lengths)
    ]
    (plan,) = planner(ranks, packing, max_tokens=capacity).plan(samples, 1)
    tokens_of = [sum(lengths[int(i)] for i in plan.sample_ids(rank)) for rank in range(ranks)]
    return len(plan.micro_batches(0)), tokens_of


@pytest.mark.parametrize("packing", ["packed", "shared_prompts"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_micro_batches_are_no_more_than_slimes_and_ranks_have_equal_work(name: str, packing: Packing) -> None:
    for count, ranks, capacity in itertools.product((64, 512), (1, 2, 4, 8), (8192, 16384)):
        lengths = lengths_like(name, count, seed=count + ranks)
        num_micro_batches, loads = cut_of(lengths, ranks, packing, capacity)
        assert num_micro_batches <= 1.02 * slime_cut(lengths, ranks, capacity).micro_batches, (count, ranks, capacity)
        if count == 512:
            assert max(loads) <= 1.02 * sum(loads) / ranks, (count, ranks, capacity)


def test_without_balancing_data_ranks_get_samples_as_they_come() -> None:
    samples = [facts(i, length) for i, length in enumerate([400, 390, 10, 20])]
    (plan,) = planner(2, cost=None).plan(samples, 1)
    assert [plan.sample_ids(rank) for rank in range(2)] == [["s000", "s001"], ["s002", "s003"]]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_batch_that_failed_whole_still_runs_its_collectives(num_steps: int) -> None:
    plans = planner(2, micro_batch_size=4).plan([facts(0, 5, Status.FAILED)], num_steps)
    assert [plan.micro_batches(rank) for plan in plans for rank in range(2)] == [((),)] * (2 * num_steps)


def test_data_ranks_are_balanced_by_tokens_of_prompt_and_response() -> None:
    cost = cost_of(TrainSection())
    assert cost is not None
    assert cost(SampleFacts("s", "g", "s", 1.0, "completed", 3, 4, 4, 0)) == 7
    assert cost_of(TrainSection(balance_data=False)) is None


def test_flops_count_attention_so_one_long_sample_costs_more_than_two_of_half_its_length(tmp_path: Path) -> None:
    flops = ModelFlops.of(read_architecture(make_tiny(tmp_path / "qwen3", "qwen3", tied=True)))
    assert flops.training([(2000, 1000)]) > 2.2 * flops.training([(1000, 500)])


def test_flops_of_linear_attention_grow_with_the_tokens_alone() -> None:
    config = tiny_config("qwen3_next")
    linear, whole = (
        ModelFlops.of(architecture(config | {"layer_types": [kind] * 2}))
        for kind in ("linear_attention", "full_attention")
    )
    assert linear.per_pair == 0
    assert whole.per_pair == 2 * 2 * 4 * 2 * 32
    assert ModelFlops.of(architecture(config)).per_pair == whole.per_pair / 2


def test_layers_that_are_an_mlp_or_a_mamba_mixer_alone_have_no_pairs() -> None:
    flops = ModelFlops.of(architecture(tiny_config("nemotron_h")))  # of four layers, one has attention
    assert flops.per_pair == 2 * 4 * 2 * 16
    weights = 2 * (264 + 96) * 64 + (64 + 2 * 32 + 64) * 64 + 2 * 64 * 96 + 2 * 160 * 4
    states = 2 * 2 * 8 * 12 * 16
    assert flops.per_token == 2 * (weights + states)
