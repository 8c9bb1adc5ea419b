"""The policy under every layout, in real ranks over gloo: equal to transformers, to each other, and after a restart.

One launch for each number of ranks; each rank runs all cases of that number (tests/support/ranks/rank_cases.py).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.trajectory import Sample
from tests.long_forms import ALL
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case, samples
from tests.support.ranks.rank_results import (
    TEMPERATURE,
    assert_log_probs_of_transformers,
    assert_round_trip,
    assert_same_training,
    assert_trained_and_resumed,
    metrics,
)
from tests.support.ranks.ranks import run_cases

pytestmark = pytest.mark.ranks

MODELS = {
    "llama-tied": ("llama", True),
    "llama-untied": ("llama", False),
    "qwen2-untied": ("qwen2", False),
    "qwen3-tied": ("qwen3", True),
    "qwen3-untied": ("qwen3", False),
}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-distributed-optimizer": (2, {"use_distributed_optimizer": True}),
    "tp2-pp2": (4, TP2 | PP2),
}
"""test_invariance has the others, with every way to cut a batch."""
if ALL:
    LAYOUTS |= {"dp2": (2, {}), "tp2": (2, TP2), "pp2": (2, PP2)}
    LAYOUTS["tp2-dp2"] = (4, TP2 | {"use_distributed_optimizer": True})
PARALLEL_MODELS = ("qwen3-tied", *(("llama-untied",) if ALL else ()))
EXACT = {"num_steps_per_rollout": 1, "use_rollout_logprobs": True, "use_tis": False, "kl_loss_type": "k3"}
PACKINGS = ("padded", "packed", "shared_prompts")
RUNS = [f"{model}@{layout}" for model in PARALLEL_MODELS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases' results, and of the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (family, tied) in MODELS.items():
        make_tiny(folder / name, family, tied=tied)
    alone = [_case(folder, f"{model}@alone", model) for model in MODELS]
    for packing in PACKINGS:
        chosen = {"micro_batch_size": 5, "packing": packing}
        alone.append(_case(folder, f"{packing}@alone", "qwen3-tied", train=chosen))
    alone.append(_case(folder, "recompute", "qwen3-tied", {"recompute_activations": True}))
    make_tiny(folder / "reference", "qwen3", tied=True, seed=8)
    alone.append(Case("exact", str(folder), str(folder / "qwen3-tied"), {}, EXACT, ref_load=str(folder / "reference")))
    alone.append(_case(folder, "sft", "qwen3-tied", train={"loss_type": "sft_loss", "num_steps_per_rollout": 1}))
    alone.append(_case(folder, "per-token@alone", "qwen3-tied", train={"calculate_per_token_loss": True}))
    run_cases(folder, 1, alone)
    for world_size in (2, 4):
        cases = [
            _case(folder, f"{model}@{layout}", model, megatron)
            for model in PARALLEL_MODELS
            for layout, (ranks, megatron) in LAYOUTS.items()
            if ranks == world_size
        ]
        if world_size == 2:
            cases.append(_case(folder, "per-token@dp2", "qwen3-tied", train={"calculate_per_token_loss": True}))
        run_cases(folder, world_size, cases)
    return folder


@pytest.mark.parametrize("run", [*(f"{model}@alone" for model in MODELS), *RUNS])
def test_log_probs_equal_transformers(runs: Path, run: str) -> None:
    assert_log_probs_of_transformers(runs / run, runs / run.split("@")[0])


@pytest.mark.parametrize("run", [*(f"{model}@alone" for model in MODELS), *RUNS])
def test_a_checkpoint_goes_through_megatron_and_back_bit_for_bit(runs: Path, run: str) -> None:
    assert_round_trip(runs / run, runs / run.split("@")[0])


@pytest.mark.parametrize("run", [f"{model}@alone" for model in MODELS] + RUNS[-1:])
def test_an_exported_model_loads_in_transformers_with_equal_logits(runs: Path, run: str) -> None:
    tokens = torch.tensor([[5, 17, 256, 40, 8, 99]])
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(runs / run.split("@")[0])(tokens).logits
        exported = AutoModelForCausalLM.from_pretrained(runs / run / "initial")(tokens).logits
    assert torch.equal(original, exported)
    tokenizer = AutoTokenizer.from_pretrained(runs / run / "initial")
    assert tokenizer.decode(tokenizer.encode("1 + 2")) == "1 + 2"


@pytest.mark.parametrize("run", RUNS)
def test_losses_gradients_and_weights_do_not_depend_on_the_layout(runs: Path, run: str) -> None:
    assert_same_training(runs / run, runs / f"{run.split('@')[0]}@alone")


@pytest.mark.parametrize("run", ["recompute", *(f"{packing}@alone" for packing in PACKINGS)])
def test_they_do_not_depend_on_micro_batches_and_recomputation(runs: Path, run: str) -> None:
    assert_same_training(runs / run, runs / "qwen3-tied@alone")


def test_a_loss_per_token_does_not_depend_on_data_ranks(runs: Path) -> None:
    assert_same_training(runs / "per-token@dp2", runs / "per-token@alone")
    assert metrics(runs / "per-token@alone")[0]["grad_norm"] != metrics(runs / "qwen3-tied@alone")[0]["grad_norm"]


@pytest.mark.parametrize("run", [*(f"{model}@alone" for model in MODELS), *RUNS])
def test_training_moves_every_weight_and_a_restored_run_goes_on_bit_for_bit(runs: Path, run: str) -> None:
    assert_trained_and_resumed(runs / run)


def test_the_first_step_has_the_loss_and_gradient_of_the_specification(runs: Path) -> None:
    """SPEC.md §5 in float64 on the transformers model: GRPO, clip-higher, k3 to a reference, entropy, rollout means."""
    network = AutoModelForCausalLM.from_pretrained(runs / "qwen3-tied").double()
    reference = AutoModelForCausalLM.from_pretrained(runs / "reference").double()
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples(0):
        if sample.reward is not None:
            rewards[sample.group_id].append(sample.reward)
    usable = [s for s in samples(0) if s.reward is not None]
    trained = [s for s in usable if s.loss_mask.any()]
    policy_loss = kl_loss = entropy_loss = torch.zeros((), dtype=torch.float64)
    for sample in trained:
        group = torch.tensor(rewards[sample.group_id], dtype=torch.float64)
        advantage = (sample.reward - group.mean()) / (group.std() + 1e-6) if len(group) > 1 else torch.tensor(0.0)
        log_probs, entropy = _response_log_probs(network, sample)
        d = log_probs - _response_log_probs(reference, sample)[0].detach()
        ratio = (log_probs - torch.from_numpy(sample.rollout_log_probs).double()).exp()
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        mask = torch.from_numpy(sample.loss_mask).double()
        share = mask / mask.sum() / len(usable)
        policy_loss = policy_loss + (share * loss).sum()
        kl_loss = kl_loss + (share * ((-d).exp() - 1 + d)).sum()
        entropy_loss = entropy_loss + (share * entropy).sum()
    (policy_loss + 0.1 * kl_loss - 0.01 * entropy_loss).backward()
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm()
    found = metrics(runs / "exact")[0]
    assert found["loss/policy"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-6)
    assert found["loss/kl"] == pytest.approx(kl_loss.item(), rel=1e-4)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_supervised_loss_is_the_mean_of_each_answers_negative_log_likelihood(runs: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(runs / "qwen3-tied").double()
    means = []
    for sample in samples(0):
        if sample.failure is None:
            mask = torch.from_numpy(sample.loss_mask).bool()
            means.append(-_response_log_probs(network, sample)[0][mask].mean().item() if mask.any() else 0.0)
    assert metrics(runs / "sft")[0]["loss/sft"] == pytest.approx(sum(means) / len(means), rel=1e-5)


def _response_log_probs(network: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(sample.tokens).long()
    start = sample.prompt_length
    table = (network(tokens[None]).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return table.gather(1, tokens[start:, None])[:, 0], -(table.exp() * table).sum(-1)


def _case(
    folder: Path, name: str, model: str, megatron: dict[str, Any] | None = None, train: dict[str, Any] | None = None
) -> Case:
    return Case(name, str(folder), str(folder / model), megatron or {}, train or {})
