"""A generate function that the documents print, over a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.weights import ServedWeights
from services.rollout.fleet_build import sglang_factory
from services.rollout.production.hooks import CustomGenerateSampler, custom_args
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import SampleRequest
from tests.long_forms import whole_run
from tests.support.documents import snippet
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.engine

FUNCTION = snippet(
    "Step 1: Define Custom Generate Function",
    """
from headrace.hooks.kit import generate_single

def extract_tool_call(response):  # a model without training calls none: every response is one
    return {"name": "look"}

def execute_tool(call):
    return "found 7"

def compute_reward(sample):
    return float(len(sample.response))
""",
)
TURNS = 3


@whole_run
async def test_each_turns_log_probs_are_those_of_the_model_for_the_whole_conversation(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "custom_generate.py").write_text(FUNCTION)
    job = Job.model_validate({"model": {"hf_checkpoint": model}, "rollout": {"max_turns": TURNS}})
    engine = sglang_factory(job, tmp_path, has_accelerator=await has_accelerator())(0)
    await engine.start(seconds=600)
    args = custom_args(hook_args(job), engine.url)
    path, weights = f"{tmp_path / 'custom_generate.py'}:custom_generate", ServedWeights()
    sampler = CustomGenerateSampler(path, args, weights, seconds=240, calls_at_once=4, per_sample=True)
    prompt = PromptEncoder(model, apply_chat_template=False).encode_messages([{"role": "user", "content": "7?"}], None)
    try:
        await sampler.start()
        requests = [
            SampleRequest(f"g/1/{i}", "g", i, prompt, None, {}, SamplingParams(max_new_tokens=8, seed=i))
            for i in range(4)
        ]
        samples = await sampler.sample_all(requests, evaluation=False)
    finally:
        await sampler.close()
        await engine.stop()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for sample in samples:
        assert sample.failure is None
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert tuple(sample.tokens[: sample.prompt_length]) == prompt.tokens
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        assert 0 < trained.sum() <= 8 * TURNS
        assert not trained.all()
        tokens = torch.tensor(sample.tokens, dtype=torch.long)
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[sample.prompt_length - 1 :, 0]
        assert torch.allclose(torch.tensor(sample.rollout_log_probs)[trained], found[trained], atol=1e-4)
