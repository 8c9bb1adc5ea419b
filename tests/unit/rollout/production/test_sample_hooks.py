"""Each sample is shown to the user's functions before it is scored; one that they make unusable is a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Failure, PolicyRange, Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.production.hooks import PreScoreHooks, WithPreScoreHooks
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest

HOOKS = """
from headrace.hooks import Sample

def noted(args, sample, evaluation=False):
    sample.metadata["evaluation"] = evaluation
    sample.loss_mask[0] = 0

async def rewarded(args, sample, **kwargs):
    assert sample.loss_mask[0] == 0, "the hooks are called in their order"
    sample.reward = float(kwargs["evaluation"])
    return sample

def raises_on_second(args, sample):
    if sample.index == 1:
        raise KeyError("no such thing")

def another_type(args, sample):
    return {"sample": sample}

def cut(args, sample):
    sample.loss_mask = [1]

def replaced(args, sample):
    tokens = sample.tokens[:3]
    return Sample(index=sample.index, prompt=sample.prompt, tokens=tokens, response_length=1, rollout_log_probs=[-1.0],
        response="x", status=Sample.Status.TRUNCATED, weight_versions=["3"])

def too_many(args, sample, third):
    pass
"""


def made(index: int, status: Status = Status.COMPLETED) -> Sample:
    length = 0 if status is Status.FAILED else 2
    return Sample(
        sample_id=f"g/1/{index}",
        group_id="g",
        index=index,
        prompt="2 + 2 =",
        response="4",
        tokens=np.arange(1, 3 + length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.uint8),
        rollout_log_probs=np.full(length, -0.5, dtype=np.float32),
        status=status,
        failure=Failure("ENGINES", "none answered") if status is Status.FAILED else None,
        policy_ranges=(PolicyRange(3, 0, 1), PolicyRange(4, 1, 2)) if length else (),
    )


class Given:
    """A sampler that has its samples already."""

    in_flight = 0

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        return list(self._samples)


@asynccontextmanager
async def shown(folder: Path, *names: str, samples: Sequence[Sample]) -> AsyncIterator[WithPreScoreHooks]:
    (folder / "hooks.py").write_text(HOOKS)
    paths = [f"{folder / 'hooks.py'}:{name}" for name in names]
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "rollout": {"rollout_sample_hook_path": paths}})
    hooks = PreScoreHooks.of(job.rollout, hook_args(job))
    assert hooks is not None
    try:
        await hooks.start()
        yield WithPreScoreHooks(Given(samples), hooks)
    finally:
        await hooks.close()


async def all_of(sampler: WithPreScoreHooks, *, evaluation: bool = False) -> list[Sample]:
    request = SampleRequest(
        "g/1/0", "g", 0, EncodedPrompt("2 + 2 =", (1, 2)), "4", {}, SamplingParams(max_new_tokens=4)
    )
    return await sampler.sample_all([request], evaluation=evaluation)


async def test_rollout_sample_hook_path_changes_samples_before_they_are_scored(tmp_path: Path) -> None:
    before = made(0)
    async with shown(tmp_path, "noted", "rewarded", samples=[before]) as sampler:
        for evaluation in (False, True):
            (after,) = await all_of(sampler, evaluation=evaluation)
            assert after.metadata == {"evaluation": evaluation}
            assert after.loss_mask.tolist() == [0, 1]
            assert (after.reward, "rewarded" in after.scorer) == (float(evaluation), True)
            assert after.policy_ranges == before.policy_ranges
            assert (after.sample_id, after.tokens.tolist()) == (before.sample_id, before.tokens.tolist())


async def test_a_sample_that_a_hook_fails_on_or_makes_unusable_fails_alone(tmp_path: Path) -> None:
    for name, reason in (("raises_on_second", "HOOK_RAISED"), ("another_type", "HOOK_RAISED"), ("cut", None)):
        async with shown(tmp_path, name, samples=[made(0), made(1)]) as sampler:
            first, second = await all_of(sampler)
        assert second.status is Status.FAILED, name
        assert second.failure is not None
        assert reason in (None, second.failure.reason), second.failure
        assert (first.status is Status.COMPLETED) is (name == "raises_on_second")


async def test_another_response_has_the_versions_that_it_names(tmp_path: Path) -> None:
    async with shown(tmp_path, "replaced", samples=[made(0)]) as sampler:
        (after,) = await all_of(sampler)
    assert (after.status, after.tokens.tolist(), after.response) == (Status.TRUNCATED, [1, 2, 3], "x")
    assert [(each.policy_version, each.start, each.end) for each in after.policy_ranges] == [(3, 0, 1)]
