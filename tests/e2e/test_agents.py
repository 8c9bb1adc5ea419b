"""The example's agent over a real engine: what is trained is what the model said, turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.trajectory import Status
from services.rollout.engine.arguments import has_accelerator
from services.rollout.fleet_build import sglang_factory
from tests.long_forms import whole_run
from tests.support.agents import SAMPLES, producing

pytestmark = [pytest.mark.engine, whole_run]

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "asks_again.py"
TURNS = 3


async def test_an_agents_log_probs_are_those_of_the_model_for_the_whole_conversation(tmp_path: Path) -> None:
    accelerator = await has_accelerator()
    async with producing(
        tmp_path,
        EXAMPLE.read_text(),
        lambda job: sglang_factory(job, tmp_path, has_accelerator=accelerator),
        num_prompts=0,
        max_turns=TURNS,
    ) as made:
        samples = await made.play(SAMPLES)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert any(0 in sample.loss_mask for sample in samples)
    for sample in samples:
        assert sample.failure is None
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.reward is not None
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        tokens = torch.tensor(sample.tokens, dtype=torch.long)
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[sample.prompt_length - 1 :, 0]
        assert torch.allclose(torch.tensor(sample.rollout_log_probs)[trained], found[trained], atol=1e-4)
