"""Log-probs on a device are transformers': `make gpu PART=parity`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.rl.algorithms.vocab_parallel import log_probs_and_entropy
from tests.gpu.devices import DEVICES, SIZES, Figure, Trained
from tests.support.ranks.device_case import DeviceCase, run

pytestmark = pytest.mark.timeout(900)


def test_log_probs_in_bfloat16_equal_transformers(trained: Trained, figure: Figure) -> None:
    expected = reference(trained, torch.bfloat16)
    assert expected.std() > 0.3  # far from uniform, so that a wrong weight would show
    difference = (torch.tensor(trained.result["log_probs"]) - expected).abs()
    differ = f"differ by {difference.mean():.1e} on average, {difference.max():.1e} at most"
    figure(f"log-probs in bfloat16, {trained.device}", differ, "transformers in bfloat16")
    assert difference.mean() < trained.size.bf16_mean_difference


def test_log_probs_in_float32_equal_transformers(trained: Trained, tmp_path: Path, figure: Figure) -> None:
    case = trained.size.case(trained.checkpoint)
    small = DeviceCase(**{**vars(case), "num_samples": 4, "num_steps": 0})
    result = run(small, tmp_path, device=trained.device, timeout_seconds=300)
    difference = (torch.tensor(result["log_probs"]) - reference(trained, torch.float32)).abs()
    differ = f"differ by {difference.mean():.1e} on average, {difference.max():.1e} at most"
    figure(f"log-probs in float32, {trained.device}", differ, "transformers in float32")
    assert difference.max() < trained.size.float32_largest_difference


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_of_the_whole_vocabulary_equal_float64s(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    vocab_size = SIZES[device].config["vocab_size"]
    hidden, weight = (torch.randn(size, 128, generator=generator) * 0.6 for size in (64, vocab_size))
    target = torch.randint(0, vocab_size, (64,), generator=generator)
    exact = torch.log_softmax(hidden.double() @ weight.double().T / 0.7, -1)
    log_probs, entropy = log_probs_and_entropy(hidden.to(device), weight.to(device), target.to(device), 0.7, None)
    assert torch.allclose(log_probs.cpu().double(), exact.gather(1, target[:, None])[:, 0], atol=2e-5, rtol=1e-5)
    assert torch.allclose(entropy.cpu().double(), -(exact.exp() * exact).sum(-1), atol=1e-4, rtol=1e-4)


def reference(trained: Trained, dtype: torch.dtype) -> torch.Tensor:
    """Log-probs of the compared samples' responses by transformers, [B, R]."""
    model = AutoModelForCausalLM.from_pretrained(trained.checkpoint, dtype=dtype).to(trained.device)
    samples = trained.size.case(trained.checkpoint).samples(0)[:2]
    rows = []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens).long().to(trained.device)
            log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
            answer = tokens[sample.prompt_length :]
            rows.append(log_probs[sample.prompt_length - 1 : -1].gather(1, answer[:, None])[:, 0].cpu())
    return torch.stack(rows)
