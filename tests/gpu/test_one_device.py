"""One rank on one device: parity with transformers, a bfloat16 step, its memory and its speed.

Every body runs tiny on a CPU in `make test`, and with a random model of 1.7e9 parameters where there is a GPU: torch,
megatron-core and transformers are all it needs. Figures are printed: `pytest tests/gpu -s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.rl.algorithms.vocab_parallel import log_probs_and_entropy
from tests.support.ranks.device_case import DeviceCase, run

pytestmark = pytest.mark.timeout(900)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")],
    ),
]


@dataclass(frozen=True)
class Size:
    """What is big enough for a device to be worth measuring."""

    config: Mapping[str, Any]
    num_samples: int
    prompt_length: int
    response_length: int
    bf16_mean_difference: float
    float32_largest_difference: float
    peak_tflops: float | None

    def case(self, checkpoint: Path, **megatron: object) -> DeviceCase:
        return DeviceCase(
            hf_checkpoint=str(checkpoint),
            vocab_size=self.config["vocab_size"],
            megatron=megatron,
            num_samples=self.num_samples,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            num_compared=2,
            num_steps=3,
            peak_tflops=self.peak_tflops,
        )


TINY = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.15,
}  # fmt: skip
QWEN3_1_7B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}  # fmt: skip
SIZES = {
    "cpu": Size(TINY, 8, 10, 20, bf16_mean_difference=0.05, float32_largest_difference=1e-4, peak_tflops=1.0),
    "cuda": Size(
        QWEN3_1_7B, 32, 512, 1536, bf16_mean_difference=0.05, float32_largest_difference=5e-3, peak_tflops=None
    ),
}


@dataclass
class Trained:
    """A device, its model in bfloat16, and what became of three steps on it."""

    device: str
    size: Size
    checkpoint: Path
    result: dict[str, Any]


@pytest.fixture(scope="module", params=DEVICES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    size = SIZES[request.param]
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**size.config, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    del model
    case = size.case(folder / "model", bf16=True)
    result = run(case, folder / "bf16", device=request.param, timeout_seconds=600)
    assert result["device"] == request.param
    return Trained(request.param, size, folder / "model", result)


def test_log_probs_in_bfloat16_equal_transformers(trained: Trained) -> None:
    expected = reference(trained, torch.bfloat16)
    assert expected.std() > 0.3  # far from uniform, so that a wrong weight would show
    difference = (torch.tensor(trained.result["log_probs"]) - expected).abs()
    print(f"{trained.device}, bfloat16: |log-prob difference| mean {difference.mean():.2e}, max {difference.max():.2e}")
    assert difference.mean() < trained.size.bf16_mean_difference


def test_log_probs_in_float32_equal_transformers(trained: Trained, tmp_path: Path) -> None:
    case = trained.size.case(trained.checkpoint)
    small = DeviceCase(**{**vars(case), "num_samples": 4, "num_steps": 0})
    result = run(small, tmp_path, device=trained.device, timeout_seconds=300)
    difference = (torch.tensor(result["log_probs"]) - reference(trained, torch.float32)).abs()
    print(f"{trained.device}, float32: |log-prob difference| mean {difference.mean():.2e}, max {difference.max():.2e}")
    assert difference.max() < trained.size.float32_largest_difference


def test_a_step_in_bfloat16_trains_and_says_how_fast(trained: Trained) -> None:
    steps = trained.result["metrics"]
    for metrics in steps:
        assert metrics["updated"] == 1.0
        assert 0.0 < metrics["grad_norm"] < float("inf")
        assert 0.0 < metrics["mfu"] < 1.0
        assert metrics["time/forward_seconds"] > 0.0
        assert metrics["time/backward_seconds"] > 0.0
    last = steps[-1]
    print(
        f"{trained.result.get('name', 'CPU')}: {trained.result['parameters'] / 1e9:.2f}e9 parameters, "
        f"{last['tokens_per_second']:.0f} tokens/s, {last['tflops_per_rank']:.1f} TFLOP/s, mfu {last['mfu']:.1%}"
    )


def test_a_step_needs_the_memory_of_weights_gradients_and_optimizer(trained: Trained) -> None:
    if trained.device == "cpu":
        pytest.skip("memory is measured on a GPU")
    # bfloat16 weights, float32 gradients, and three float32 copies: master weights and Adam's moments.
    expected = trained.result["parameters"] * (2 + 4 + 3 * 4)
    allocated, peak = trained.result["allocated_bytes"], trained.result["peak_bytes"]
    print(f"expected {expected / 1e9:.1f} GB, allocated {allocated / 1e9:.1f} GB, at most {peak / 1e9:.1f} GB")
    assert expected * 0.95 < allocated < expected * 1.1 + 2**30


def test_a_rank_gives_its_memory_to_engines_and_goes_on_with_the_same_weights(trained: Trained) -> None:
    turn = trained.result["turn"]
    assert turn["largest_difference"] == 0.0
    if trained.device == "cpu":
        return  # it has no memory apart from the host's
    gigabytes = {name: turn[f"{name}_bytes"] / 1e9 for name in ("had", "left", "has")}
    print(
        f"a turn of engines: {gigabytes['had']:.2f} GB, {gigabytes['left']:.2f} GB, {gigabytes['has']:.2f} GB again; "
        f"to the host in {turn['first_to_host_seconds']:.2f} s the first time, then in "
        f"{turn['to_host_seconds']:.2f} s, back in {turn['to_device_seconds']:.2f} s"
    )
    assert turn["left_bytes"] < 0.05 * turn["had_bytes"] + 2**28


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
