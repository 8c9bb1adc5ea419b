"""The generate functions that README and docs print run as printed, and what they make can be trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Status
from services.rollout.engine.api import SamplingParams
from services.rollout.production.hooks import CustomGenerateSampler, custom_args
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest
from tests.support.fakes.fake_fleet import fake_fleet
from tests.support.models.tiny_model import make_tiny_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("document", "turns"), [("README.md", 1), ("docs/hooks.md", 2)])
async def test_a_printed_generate_function_makes_samples(tmp_path: Path, document: str, turns: int) -> None:
    code, *_ = re.findall(r"```python\n(# agent\.py\n.*?)```", (ROOT / document).read_text(), re.S)
    (tmp_path / "agent.py").write_text(code)
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    sections = {"model": {"hf_checkpoint": tmp_path / "model"}, "rollout": {"max_turns": turns}}
    async with fake_fleet(1) as fakes:
        await fakes.name_weights(0, 3)
        fakes.fleet.weights.switch_to(3)
        args = custom_args(hook_args(Job.model_validate(sections)), fakes.fleet.engines[0].url)
        path, weights = f"{tmp_path / 'agent.py'}:generate", fakes.fleet.weights
        sampler = CustomGenerateSampler(path, args, weights, seconds=120, calls_at_once=1)
        try:
            await sampler.start()
            prompt = EncodedPrompt("2 + 2 =", tuple(tokenizer.encode("2 + 2 =")))
            request = SampleRequest("g/1/0", "g", 0, prompt, "4", {}, SamplingParams(max_new_tokens=4))
            (sample,) = await sampler.sample_all([request], evaluation=False)
        finally:
            await sampler.close()
    assert sample.failure is None
    assert sample.status is Status.TRUNCATED
    assert sample.tokens[: sample.prompt_length].tolist() == list(prompt.tokens)
    assert sample.loss_mask.sum() == 4 * turns
    assert (sample.loss_mask == 0).any() == (turns > 1)
    assert sample.response
    assert [r.policy_version for r in sample.policy_ranges] == [3]
