"""The policy in two ranks over gloo: the specification's loss, what a job may do with it, and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.trajectory import Sample
from services.trainer.checkpoint.checkpoint import step_name
from tests.long_forms import ALL
from tests.support.models.float64_reference import TEMPERATURE, against_group, log_probs_of
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case, samples
from tests.support.ranks.rank_results import assert_same_training, metrics, weights
from tests.support.ranks.ranks import Sections, run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_STEP = {"num_steps_per_rollout": 1, "use_tis": False}
EXACT = ONE_STEP | {"use_rollout_logprobs": True, "kl_loss_type": "k3"}
LAYER_0, EMBEDDING = "model.layers.0.", "model.embed_tokens.weight"
PPO = ONE_STEP | {"advantage_estimator": "ppo", "use_kl_loss": False}
PER_TOKEN = {"calculate_per_token_loss": True}
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "exact": (1, {}, EXACT),
    "sft": (1, {}, {"loss_type": "sft_loss", "num_steps_per_rollout": 1}),
    "alone": (1, {}, {}),
    "recomputed": (1, {"recompute_activations": True}, {}),
    "per-token": (1, {}, PER_TOKEN),
    "per-token@dp2": (2, {}, PER_TOKEN),
    "plain": (2, PP2, {}),
    "recomputed-in-full": (2, PP2 | FULL, {}),
    "first-stage-frozen": (2, PP2, {"freeze_params_name_list": [r"layers\.0\.", "embedding"]}),
    "mlp-only": (2, DISTRIBUTED, {"only_train_params_name_list": [r"mlp\.linear"]}),
    "old-policy-kept": (2, TP2, ONE_STEP | {"keep_old_actor": True}),
    "old-policy-current": (2, TP2, ONE_STEP),
    "reference-follows": (2, {}, ONE_STEP | {"ref_update_interval": 1}),
    "bf16": (2, DISTRIBUTED | {"bf16": True}, {}),
    "started": (2, TP2, {}),
    "critic": (2, PP2, PPO),
}
if ALL:
    RUNS |= {
        "last-norm-only": (2, PP2, {"only_train_params_name_list": ["final_layernorm"]}),
        "recomputed-mlp": (
            *(2, PP2 | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}),
            {},
        ),
        "overlapping-reduction": (2, DISTRIBUTED | {"overlap_grad_reduce": True}, {}),
        "sgd": (2, TP2 | {"optimizer": "sgd", "lr": 0.1}, {}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases' results, and of the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("policy")
    make_tiny(folder / "model", "qwen3", tied=True)
    make_tiny(folder / "reference", "qwen3", tied=True, seed=8)
    more: dict[str, Sections] = {
        "exact": {"model": {"ref_load": str(folder / "reference")}},
        "critic": {"critic": {"critic_lr": 1e-2}},
        "started": {
            "checkpoint": {"initial_megatron_checkpoint": str(folder / "plain" / "checkpoints" / step_name(1))}
        },
    }
    cases = [
        Case(
            *(name, str(folder), str(folder / "model")),
            {"megatron": megatron, "train": train, "buffer": {"max_staleness": 1}, **more.get(name, {})},
            ranks,
            staleness=1 if ranks == 2 else 0,
        )
        for name, (ranks, megatron, train) in RUNS.items()
    ]
    run_cases(folder, 2, cases)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_a_restored_run_goes_on_bit_for_bit(runs: Path, run: str) -> None:
    went_on, resumed = weights(runs / run / "twice_trained"), weights(runs / run / "resumed")
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)
    _, second, restored = metrics(runs / run)
    of_critic = [name for name in second if name.startswith("critic/")]
    assert [second[name] for name in of_critic] == [restored[name] for name in of_critic]
    assert len(of_critic) == (6 if run == "critic" else 0)


@pytest.mark.parametrize("run", ["recomputed", "recomputed-in-full", *(["recomputed-mlp"] if ALL else [])])
def test_recomputation_changes_no_weight(runs: Path, run: str) -> None:
    plain = "alone" if run == "recomputed" else "plain"
    expected, found = weights(runs / plain / "twice_trained"), weights(runs / run / "twice_trained")
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=1e-5, atol=1e-7), name


def test_a_loss_per_token_does_not_depend_on_data_ranks(runs: Path) -> None:
    assert_same_training(runs / "per-token@dp2", runs / "per-token")
    assert metrics(runs / "per-token")[0]["grad_norm"] != metrics(runs / "alone")[0]["grad_norm"]


@pytest.mark.parametrize(
    ("run", "is_trained"),
    [
        ("first-stage-frozen", lambda name: not name.startswith(LAYER_0) and name != EMBEDDING),
        ("mlp-only", lambda name: ".mlp." in name),
    ],
)
def test_only_what_is_to_be_trained_is_trained(runs: Path, run: str, is_trained: Any) -> None:
    before, after = weights(runs / run / "initial"), weights(runs / run / "twice_trained")
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) != is_trained(name), name


def test_with_keep_old_actor_the_ratio_is_to_the_policy_that_a_sample_came_from(runs: Path) -> None:
    first, second, resumed = metrics(runs / "old-policy-kept")
    assert first["ratio/mean"] == 1.0
    assert abs(second["ratio/mean"] - 1.0) > 1e-4
    assert resumed["ratio/mean"] == second["ratio/mean"]
    assert metrics(runs / "old-policy-current")[1]["ratio/mean"] == 1.0


def test_a_reference_that_follows_is_the_policy_before_the_step(runs: Path) -> None:
    """With ref_update_interval 1."""
    assert [row["loss/kl"] for row in metrics(runs / "reference-follows")] == [0.0, 0.0, 0.0]
    assert metrics(runs / "old-policy-current")[1]["loss/kl"] > 0.0


def test_a_run_may_start_with_the_weights_of_another_runs_checkpoint(runs: Path) -> None:
    trained, initial = weights(runs / "plain" / "trained"), weights(runs / "started" / "initial")
    assert all(torch.equal(initial[name], trained[name]) for name in trained)
    assert metrics(runs / "started")[0]["lr"] == metrics(runs / "plain")[0]["lr"]  # optimizer and schedule are new


def test_bfloat16_is_one_dtype_in_training_and_in_the_export(runs: Path) -> None:
    exported = weights(runs / "bf16" / "twice_trained")
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    assert json.loads((runs / "bf16" / "twice_trained" / "config.json").read_text())["dtype"] == "bfloat16"
    before = weights(runs / "bf16" / "initial")
    assert all(not torch.equal(before[name], exported[name]) for name in before if "norm" not in name)


def test_the_first_step_has_the_loss_and_gradient_of_the_specification(runs: Path) -> None:
    """SPEC.md §5 in float64 on the transformers model: GRPO, clip-higher, k3 to a reference, entropy, rollout means."""
    network = AutoModelForCausalLM.from_pretrained(runs / "model").double()
    reference = AutoModelForCausalLM.from_pretrained(runs / "reference").double()
    usable = [s for s in samples(0) if s.reward is not None]
    policy_loss = kl_loss = entropy_loss = torch.zeros((), dtype=torch.float64)
    for sample in (s for s in usable if s.loss_mask.any()):
        log_probs, entropy = log_probs_of(network, sample), _entropy(network, sample)
        d = log_probs - log_probs_of(reference, sample).detach()
        ratio = (log_probs - torch.from_numpy(sample.rollout_log_probs).double()).exp()
        advantage = against_group("grpo", sample, usable)
        loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        mask = torch.from_numpy(sample.loss_mask).double()
        share = mask / mask.sum() / len(usable)
        policy_loss = policy_loss + (share * loss).sum()
        kl_loss = kl_loss + (share * ((-d).exp() - 1 + d)).sum()
        entropy_loss = entropy_loss + (share * entropy).sum()
    (policy_loss + 0.1 * kl_loss - 0.01 * entropy_loss).backward()  # kl_loss_coef, entropy_coef; eps_clip_high above
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm()
    found = metrics(runs / "exact")[0]
    assert found["loss/policy"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-6)
    assert found["loss/kl"] == pytest.approx(kl_loss.item(), rel=1e-4)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_supervised_loss_is_the_mean_of_each_answers_negative_log_likelihood(runs: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(runs / "model").double()
    means = []
    for sample in samples(0):
        if sample.failure is None:
            mask = torch.from_numpy(sample.loss_mask).bool()
            means.append(-log_probs_of(network, sample)[mask].mean().item() if mask.any() else 0.0)
    assert metrics(runs / "sft")[0]["loss/sft"] == pytest.approx(sum(means) / len(means), rel=1e-5)


def _entropy(network: Any, sample: Sample) -> Tensor:
    logits = network(torch.from_numpy(sample.tokens).long()[None]).logits[0, sample.prompt_length - 1 : -1]
    table = (logits / TEMPERATURE).log_softmax(-1)
    return -(table.exp() * table).sum(-1)
