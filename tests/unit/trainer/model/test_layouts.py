"""What a job may do with its layers, parameters and old policies, in two ranks over gloo; one launch for all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.checkpoint.checkpoint import step_name
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.rank_cases import Case
from tests.support.ranks.rank_results import metrics, weights
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE_STEP = {"num_steps_per_rollout": 1, "use_tis": False}
STALE = {"buffer": {"max_staleness": 1}}
LAYER_0, EMBEDDING = "model.layers.0.", "model.embed_tokens.weight"
FROZEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embedding": (PP2, {"freeze_params_name_list": ["embedding"]}),
    "first-stage": (PP2, {"freeze_params_name_list": [r"layers\.0\.", "embedding"]}),
    "all-but-last-norm": (PP2, {"only_train_params_name_list": ["final_layernorm"]}),
    "all-but-mlp": (DISTRIBUTED, {"only_train_params_name_list": [r"mlp\.linear"]}),
}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (PP2, {}),
    "recomputed-in-full": (PP2 | FULL, {}),
    "recomputed-mlp": (PP2 | {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, {}),
    "overlapping-reduction": (DISTRIBUTED | {"overlap_grad_reduce": True}, {}),
    "old-policy-kept": (TP2, ONE_STEP | {"keep_old_actor": True}),
    "old-policy-current": (TP2, ONE_STEP),
    "old-log-probs-computed": ({"lr": 0.0}, {"keep_old_actor": True}),
    "old-log-probs-skipped": ({"lr": 0.0}, {}),
    "reference-follows": ({}, ONE_STEP | {"ref_update_interval": 1}),
    "reference-stays": ({}, ONE_STEP),
    "sgd": (TP2 | {"optimizer": "sgd", "lr": 0.1}, {}),
    "bf16": (DISTRIBUTED | {"bf16": True}, {}),
}
PPO, CRITIC = {"advantage_estimator": "ppo", "use_kl_loss": False}, {"critic": {"critic_lr": 1e-2}}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 1}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no-such-parameter": (PP2, {"freeze_params_name_list": ["lora"]}, "'lora' matches no parameter's name"),
    "nothing-to-train": (PP2, {"freeze_params_name_list": ["."]}, "nothing is left to train"),
    "wrong-layers": (PP2 | {"num_layers_in_first_pipeline_stage": 2}, {}, "Megatron-core refuses"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    make_tiny(folder / "model", "qwen3", tied=True)
    make_tiny(folder / "three-layers", "qwen3", tied=True, num_layers=3)
    cases = [
        Case(name, str(folder), str(folder / "model"), megatron, train, sections=STALE, lag=1)
        for name, (megatron, train) in (FROZEN | OTHERS).items()
    ]
    started = {
        "save": str(folder / "started" / "checkpoints"),
        "initial_megatron_checkpoint": str(folder / "plain" / "checkpoints" / step_name(1)),
    }
    cases.append(Case("started", str(folder), str(folder / "model"), TP2, sections={"checkpoint": started}))
    cases.append(Case("critic", str(folder), str(folder / "model"), PP2, ONE_STEP | PPO, sections=CRITIC))
    cases.append(Case("uneven", str(folder), str(folder / "three-layers"), UNEVEN))
    cases.append(Case("even", str(folder), str(folder / "three-layers"), DISTRIBUTED))
    cases += [
        Case(name, str(folder), str(folder / "model"), megatron, train, refused=True)
        for name, (megatron, train, _) in REFUSED.items()
    ]
    run_cases(folder, 2, cases)
    return folder


@pytest.mark.parametrize("run", [*FROZEN, *OTHERS, "started", "critic", "uneven"])
def test_a_restored_run_goes_on_bit_for_bit(runs: Path, run: str) -> None:
    went_on, resumed = weights(runs / run / "twice_trained"), weights(runs / run / "resumed")
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)


def test_a_restored_critic_goes_on_bit_for_bit(runs: Path) -> None:
    _, went_on, resumed = metrics(runs / "critic")
    names = [name for name in went_on if name.startswith("critic/")]
    assert len(names) == 6
    assert [went_on[name] for name in names] == [resumed[name] for name in names]
    assert went_on["critic/value"] != 0.0


@pytest.mark.parametrize(
    ("run", "is_trained"),
    [
        ("embedding", lambda name: name != EMBEDDING),
        ("first-stage", lambda name: not name.startswith(LAYER_0) and name != EMBEDDING),
        ("all-but-last-norm", lambda name: name == "model.norm.weight"),
        ("all-but-mlp", lambda name: ".mlp." in name),
    ],
)
def test_only_what_is_to_be_trained_is_trained(runs: Path, run: str, is_trained: Any) -> None:
    before, after = weights(runs / run / "initial"), weights(runs / run / "twice_trained")
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) != is_trained(name), name


@pytest.mark.parametrize("run", ["recomputed-in-full", "recomputed-mlp"])
def test_recomputation_changes_no_weight(runs: Path, run: str) -> None:
    expected, found = weights(runs / "plain" / "twice_trained"), weights(runs / run / "twice_trained")
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=1e-5, atol=1e-7), name


def test_stages_of_uneven_length_train_alike(runs: Path) -> None:
    expected, found = weights(runs / "even" / "twice_trained"), weights(runs / "uneven" / "twice_trained")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).norm() / weight.norm() < 1e-5, name


def test_with_keep_old_actor_the_ratio_is_to_the_policy_that_a_sample_came_from(runs: Path) -> None:
    first, second, resumed = metrics(runs / "old-policy-kept")
    assert first["ratio/mean"] == 1.0
    assert abs(second["ratio/mean"] - 1.0) > 1e-4
    assert resumed["ratio/mean"] == second["ratio/mean"]
    assert metrics(runs / "old-policy-current")[1]["ratio/mean"] == 1.0


def test_old_log_probs_that_are_skipped_are_those_that_would_be_computed(runs: Path) -> None:
    """Without learning, the kept policy is the current one: computed from its copy, and skipped."""
    computed, skipped = metrics(runs / "old-log-probs-computed"), metrics(runs / "old-log-probs-skipped")
    for mine, theirs in zip(computed, skipped, strict=True):
        for name in ("loss/policy", "loss/kl", "grad_norm", "ratio/mean", "tis_weight/mean", "log_prob_diff/mean"):
            assert mine[name] == theirs[name], name


def test_a_reference_that_follows_is_the_policy_before_the_step(runs: Path) -> None:
    follows, stays = metrics(runs / "reference-follows"), metrics(runs / "reference-stays")
    assert follows[0]["loss/kl"] == stays[0]["loss/kl"] == 0.0
    assert [row["loss/kl"] for row in follows[1:]] == [0.0, 0.0]
    assert stays[1]["loss/kl"] > 0.0


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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(runs: Path, name: str) -> None:
    assert REFUSED[name][2] in (runs / name / "error.txt").read_text()
