"""Every algorithm in the real trainer: its loss and gradient against SPEC.md §5 in float64 on the transformers model.

One launch for each number of ranks; each rank runs all cases of that number (tests/support/ranks/algorithm_cases.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.long_forms import ALL
from tests.support.models.float64_reference import (
    GAMMA,
    HIGH,
    KL_COEF,
    LAMBDA,
    LOW,
    OPD_COEF,
    Answer,
    advantages_of,
    cispo,
    clipped,
    gspo,
    trained,
)
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.algorithm_cases import AlgorithmCase, told
from tests.support.ranks.rank_results import metrics, network, weights
from tests.support.ranks.ranks import Sections, run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

CONSTANT = 16.0
REFERENCE = {"ref_load": "{folder}/reference"}
WHITENED = {"normalize_advantages": True, "kl_coef": KL_COEF}
MIS_LOW = 0.35
MODELS = ("qwen3_next", "gpt_oss", "olmo3", "minimax_m2")
RECOMPUTED = {"use_rollout_logprobs": False, "num_steps_per_rollout": 2}


def _hooks(**functions: str) -> Sections:
    return {"hooks": {option: f"tests.support.ranks.trainer_hooks.{name}" for option, name in functions.items()}}


ESTIMATORS: dict[str, Sections] = {
    "grpo": {},
    "dr_grpo": {"train": {"disable_grpo_std_normalization": True, "loss_constant_length": CONSTANT}},
    "per_token": {"train": {"calculate_per_token_loss": True}},
    **({name: {"train": {"advantage_estimator": name}} for name in ("gspo", "cispo", "rloo")} if ALL else {}),
    "reinforce_plus_plus": {
        "train": {"advantage_estimator": "reinforce_plus_plus", "gamma": GAMMA, **WHITENED},
        "model": REFERENCE,
    },
    "ppo": {
        "train": {"advantage_estimator": "ppo", "gamma": GAMMA, "lambd": LAMBDA, "kl_coef": KL_COEF},
        "model": REFERENCE,
    },
    "opd_sglang": {"distillation": {"use_opd": True, "opd_kl_coef": OPD_COEF}},
    "opd_megatron": {
        "distillation": {
            "use_opd": True,
            "opd_type": "megatron",
            "opd_kl_coef": OPD_COEF,
            "opd_teacher_load": "{folder}/reference",
        }
    },
}
OTHERS: dict[str, Sections] = {
    "unbiased_kl": {
        "train": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
        "model": REFERENCE,
    },
    "mis": {
        "train": {"use_tis": True, "tis_mode": "mask", "tis_level": "geometric", "tis_clip_low": MIS_LOW}
        | {"use_rollout_logprobs": False},
    },
    "normalized": {"train": {"use_tis": True, "tis_batch_normalize": True, "use_rollout_logprobs": False}},
    "rejected": {
        "train": {"use_rs": True, "rs_lower_bound": 0.5, "rs_upper_bound": 1.5, "use_rollout_logprobs": False}
    },
    "opsm": {"train": {"use_opsm": True, "opsm_delta": 0.05}},
    "critic_first": {
        "train": {"advantage_estimator": "ppo"},
        "critic": {"num_critic_only_steps": 1},
    },
    "true_on_policy": {"train": {"true_on_policy_mode": True, "use_rollout_logprobs": False}},
    "on_policy": {"train": {"use_rollout_logprobs": False}},
    "truncated": {"train": {"use_tis": True, **RECOMPUTED}},
    "hook_tis": {"train": {"use_tis": True, **RECOMPUTED}, **_hooks(custom_tis_function_path="tis")},
    "hook_advantage": _hooks(custom_advantage_function_path="advantage"),
    "hook_reducer": {
        "train": {"disable_grpo_std_normalization": True},
        **_hooks(custom_pg_loss_reducer_function_path="reducer"),
    },
    "hook_post_process": _hooks(custom_reward_post_process_path="post_process"),
    "hook_filter": _hooks(rollout_sample_filter_path="sample_filter"),
    "hook_train_data": _hooks(custom_convert_samples_to_train_data_path="train_data"),
    "hook_log": _hooks(custom_rollout_log_function_path="rollout_log"),
    "hook_model": _hooks(custom_megatron_init_path="megatron_init", custom_model_provider_path="model_provider"),
    "hook_log_prob": {
        "train": {**RECOMPUTED, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "model": REFERENCE,
        **_hooks(custom_megatron_before_log_prob_hook_path="before_log_prob"),
    },
    "hook_loss": {"train": {"loss_type": "custom_loss"}, **_hooks(custom_loss_function_path="loss")},
    "hooks_around": {
        "train": {"num_steps_per_rollout": 2},
        **_hooks(
            rollout_data_postprocess_path="data_postprocess",
            custom_megatron_before_train_step_hook_path="before_train_step",
        ),
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    **({"dp2": {}, "tp2": {"tensor_model_parallel_size": 2}} if ALL else {}),
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
"""Stages and context ranks divide a sample."""
SPREAD = ("ppo", "reinforce_plus_plus", "normalized", *(("gspo", "hook_reducer") if ALL else ()))
HOOKED = ("hook_loss", "hook_post_process", "hook_filter", "hook_train_data", "hook_log", "hook_model")
SPREAD_RUNS: dict[str, Sections] = {
    f"{name}@{layout}": {**(ESTIMATORS | OTHERS)[name], "megatron": LAYOUTS[layout]}
    for name in (*SPREAD, *HOOKED)
    for layout in LAYOUTS
    if (name, layout) != ("hook_loss", "tp2")  # its logits are a shard of the vocabulary there
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all cases' results, and of the checkpoints they started from."""
    folder = tmp_path_factory.mktemp("algorithms")
    make_tiny(folder / "model", "qwen3", tied=True)
    make_tiny(folder / "reference", "qwen3", tied=True, seed=8)
    for name in MODELS:
        make_tiny(folder / name, name)
    with mock.patch.dict(os.environ, {"HEADRACE_TEST_NOTES": str(folder / "notes")}):
        alone = [_case(folder, *item) for item in (ESTIMATORS | OTHERS).items()]
        run_cases(folder, 1, [*alone, *(AlgorithmCase(name, str(folder), str(folder / name), {}) for name in MODELS)])
    with mock.patch.dict(os.environ, {"HEADRACE_TEST_NOTES": str(folder / "notes-of-two")}):
        run_cases(folder, 2, [_case(folder, *item) for item in SPREAD_RUNS.items()])
    return folder


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_first_step_has_the_loss_and_gradient_of_the_specification(runs: Path, name: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(runs / "model").double()
    answers = _answers(runs, network)
    advantages = advantages_of(name, answers)
    length = {
        "per_token": lambda a: sum(x.mask.sum() for x in answers) / len(answers),
        "dr_grpo": lambda a: CONSTANT,
    }.get(name, lambda a: a.mask.sum())
    token_loss = {"gspo": gspo, "cispo": cispo}.get(name, clipped)
    loss = torch.zeros((), dtype=torch.float64)
    for answer, advantage in zip(answers, advantages, strict=True):
        if answer.mask.any():
            loss = loss + (answer.mask * token_loss(answer, advantage)).sum() / length(answer) / len(answers)
    _assert_loss_and_gradient(metrics(runs / name)[0], loss, network)


@pytest.mark.parametrize("name", MODELS)
def test_other_kinds_of_attention_have_the_gradient_of_transformers(runs: Path, name: str) -> None:
    """Whose float64 has float32 in it, in norms and states."""
    model = network(runs / name)
    answers = [Answer(model, model, sample) for sample in told(0) if sample.reward is not None]
    terms = [
        (a.mask * clipped(a, advantage)).sum() / a.mask.sum()
        for a, advantage in zip(answers, advantages_of("grpo", answers), strict=True)
        if a.mask.any()
    ]
    _assert_loss_and_gradient(metrics(runs / name)[0], torch.stack(terms).sum() / len(answers), model)


def _assert_loss_and_gradient(found: dict[str, float], loss: Tensor, model: Any) -> None:
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert found["loss/policy"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "teacher"), [("opd_sglang", lambda a: a.teacher), ("opd_megatron", lambda a: a.reference)]
)
def test_the_distance_to_the_teacher_is_the_mean_over_the_trained_tokens(
    runs: Path, name: str, teacher: Callable[[Answer], Tensor]
) -> None:
    """With opd_type and opd_teacher_load."""
    gaps = torch.cat([(a.old - teacher(a))[a.mask > 0] for a in trained(_answers(runs))])
    assert metrics(runs / name)[0]["opd/kl"] == pytest.approx(gaps.mean().item(), rel=1e-4)


def test_a_critic_that_knows_nothing_yet_has_the_mean_square_of_the_returns_as_its_loss(runs: Path) -> None:
    answers = _answers(runs)
    expected = sum(
        float((a.mask * returns**2).sum() / a.mask.sum())
        for a, returns in zip(answers, advantages_of("ppo", answers), strict=True)
        if a.mask.any()
    ) / len(answers)
    first, second = metrics(runs / "ppo")
    assert first["critic/loss"] == pytest.approx(expected, rel=1e-4)
    assert first["critic/value"] == 0.0
    assert second["critic/value"] != 0.0


def test_the_critic_is_warmed_up_before_the_policy_moves(runs: Path) -> None:
    first, second = metrics(runs / "critic_first")
    assert first["critic/grad_norm"] > 0
    assert "loss/policy" not in first
    assert second["loss/policy"] != 0.0
    assert second["critic/lr"] == 1e-2


@pytest.mark.parametrize("run", [run for run in SPREAD_RUNS if not run.startswith("hook_loss@")])
def test_no_algorithm_depends_on_the_layout(runs: Path, run: str) -> None:
    _assert_same(runs, run, run.split("@")[0])


def test_unbiased_kl_is_the_estimate_times_the_ratio(runs: Path) -> None:
    answers = _answers(runs)
    expected = 0.0
    for a in trained(answers):
        d = a.log_probs - a.reference
        kl = a.ratio * ((-d).exp() - 1 + d)
        expected += float(((a.mask * kl).sum() / a.mask.sum()).detach()) / len(answers)
    assert metrics(runs / "unbiased_kl")[0]["loss/kl"] == pytest.approx(expected, rel=1e-4)


def test_the_ratio_of_one_optimizer_step_is_exactly_one(runs: Path) -> None:
    for row in metrics(runs / "on_policy"):
        assert row["ratio/mean"] == 1.0
        assert row["clip_fraction"] == 0.0
        assert row["ppo_kl"] == 0.0


def test_true_on_policy_mode_stops_with_both_figures(runs: Path) -> None:
    message = (runs / "true_on_policy" / "error.txt").read_text()
    answers = _answers(runs)
    pairs = [p for a in answers for p in zip(a.log_probs[a.mask > 0], a.old[a.mask > 0], strict=True)]
    trainer, engine = max(((float(t), float(e)) for t, e in pairs), key=lambda pair: abs(pair[0] - pair[1]))
    figures = re.search(r"a token log-prob (\S+), the engine gave it (\S+): 4\.4 apart", message)
    assert figures is not None
    assert [float(figure) for figure in figures.groups()] == pytest.approx([trainer, engine], abs=1e-4)
    assert "at most 0.001 is on-policy" in message


def test_off_policy_corrections_weigh_the_loss(runs: Path) -> None:
    """With use_tis, tis_mode and tis_level: on one optimizer step a token's loss is -A times its weight."""
    answers = _answers(runs)
    expected, weights = 0.0, []
    for answer, advantage in zip(answers, advantages_of("grpo", answers), strict=True):
        if answer.mask.any():
            gap = (answer.log_probs - answer.old).detach()
            ratio = (gap * answer.mask).sum().div(answer.mask.sum()).exp() + 0 * gap
            weight = torch.where((ratio >= MIS_LOW) & (ratio <= 2.0), ratio, 0.0)
            weights.append(weight[answer.mask > 0])
            expected += float((answer.mask * weight * -advantage).sum() / answer.mask.sum()) / len(answers)
    found = metrics(runs / "mis")[0]
    assert found["loss/policy"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < found["tis_weight/truncated"] < 1
    _assert_statistics(found, "tis_weight", torch.cat(weights))


def test_normalized_weights_have_a_mean_of_one_over_the_optimizer_step(runs: Path) -> None:
    """With tis_batch_normalize."""
    answers = _answers(runs)
    weights = [(answer.log_probs - answer.old).detach().exp().clamp(max=2.0) for answer in answers]
    mean = torch.cat([w[a.mask > 0] for w, a in zip(weights, answers, strict=True)]).mean()
    expected = sum(
        float((a.mask * w / mean * -advantage).sum() / a.mask.sum())
        for w, a, advantage in zip(weights, answers, advantages_of("grpo", answers), strict=True)
        if a.mask.any()
    ) / len(answers)
    assert metrics(runs / "normalized")[0]["loss/policy"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert mean != pytest.approx(1.0, rel=1e-2)


def test_what_is_rejected_stays_in_the_divisor(runs: Path) -> None:
    answers = _answers(runs)
    expected = 0.0
    for a, advantage in zip(answers, advantages_of("grpo", answers), strict=True):
        ratio = (a.log_probs - a.old).detach().exp()
        kept = a.mask * ((ratio >= 0.5) & (ratio <= 1.5))
        expected += float((kept * -advantage).sum() / a.mask.sum()) / len(answers) if a.mask.any() else 0.0
    found = metrics(runs / "rejected")[0]
    assert found["loss/policy"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < found["rs/rejected"] < 1
    assert found["rs/vetoed"] == 0


def test_the_ratio_is_reported_over_all_trained_tokens(runs: Path) -> None:
    answers = _answers(runs)
    ratios = torch.cat([answer.ratio[answer.mask > 0].detach() for answer in answers])
    _assert_statistics(metrics(runs / "grpo")[0], "ratio", ratios)


def test_opsm_leaves_out_bad_answers_that_the_policy_left(runs: Path) -> None:
    assert 0 < metrics(runs / "opsm")[0]["opsm/masked"] < 1
    assert metrics(runs / "opsm")[0]["loss/policy"] != metrics(runs / "grpo")[0]["loss/policy"]


@pytest.mark.parametrize(
    ("hooked", "built_in"), [("hook_advantage", "grpo"), ("hook_tis", "truncated"), ("hook_reducer", "dr_grpo")]
)
def test_a_hook_that_does_what_the_trainer_does_trains_the_same(runs: Path, hooked: str, built_in: str) -> None:
    _assert_same(runs, hooked, built_in)


def test_a_custom_loss_is_what_is_minimised(runs: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(runs / "model").double()
    answers = _answers(runs, network)
    loss = torch.zeros((), dtype=torch.float64)
    for answer, advantage in zip(answers, advantages_of("grpo", answers), strict=True):
        if answer.mask.any():
            loss = loss - (answer.mask * advantage * answer.log_probs).sum() / answer.mask.sum() / len(answers)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm()
    for run in ("hook_loss", *(run for run in SPREAD_RUNS if run.startswith("hook_loss@"))):
        found = metrics(runs / run)[0]
        assert found["loss/custom/loss"] == pytest.approx(found["loss/custom"], rel=1e-5)
        assert found["loss/custom"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_post_processed_rewards_are_what_is_trained_on(runs: Path) -> None:
    """Twice the centred reward, by one call for all ranks."""
    answers = _answers(runs)
    expected = 0.0
    for answer, advantage in zip(answers, advantages_of("dr_grpo", answers), strict=True):
        if answer.mask.any():
            token_loss = clipped(answer, 2 * advantage)
            expected += float((answer.mask * token_loss).sum() / answer.mask.sum()) / len(answers)
    assert metrics(runs / "hook_post_process")[0]["loss/policy"] == pytest.approx(expected, rel=1e-4)
    assert len(_notes(runs, "post_process")) == 2
    assert len(_notes(runs, "post_process", "notes-of-two")) == 2 * len(LAYOUTS)


def test_metadata_and_train_metadata_reach_the_hooks(runs: Path) -> None:
    known = [sample for sample in told(0) if sample.failure is None]
    train_metadata, metadata, eps_clip = _notes(runs, "advantage")[0]
    assert sorted(m["weight"] for m in train_metadata) == [s.train_metadata["weight"] for s in known]
    assert sorted(m["difficulty"] for m in metadata) == [s.metadata["difficulty"] for s in known]
    assert eps_clip == 0.2
    assert [m["weight"] for m in _notes(runs, "post_process")[0]] == [s.train_metadata["weight"] for s in known]
    seen = [m["weight"] for batch in _notes(runs, "loss") for m in batch]
    assert set(seen) >= {s.train_metadata["weight"] for s in known}
    assert _notes(runs, "tis")[0] == ["metadata", "response_lengths", "total_lengths"]


def test_the_hooks_around_a_step_are_told_where_they_are(runs: Path) -> None:
    steps = [note[:3] for note in _notes(runs, "before_train_step")]
    assert steps == [[0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert [note[:2] for note in _notes(runs, "data_postprocess")] == [[0, 9], [1, 9]]


def test_what_a_sample_filter_leaves_out_counts_for_its_group_alone(runs: Path) -> None:
    answers = _answers(runs)
    seen, expected = set(), 0.0
    for answer, advantage in zip(answers, advantages_of("grpo", answers), strict=True):
        mask = answer.mask.clone()
        mask[-1] = 0
        if answer.sample.group_id in seen and mask.any():
            expected += float((mask * clipped(answer, advantage)).sum() / mask.sum()) / len(answers)
        seen.add(answer.sample.group_id)
    first = metrics(runs / "hook_filter")[0]
    assert first["loss/policy"] == pytest.approx(expected, rel=1e-4)
    assert first["samples/removed"] == len(seen)


def test_converted_rewards_masks_and_log_probs_are_what_is_trained_on(runs: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(runs / "model").double()
    answers = [Answer(network, network, sample) for sample in told(0) if sample.failure is None]
    expected = 0.0
    for reward, answer in enumerate(answers):
        ratio = (answer.log_probs - (answer.old - 0.1)).exp()
        losses = torch.maximum(-ratio * reward, -ratio.clamp(LOW, HIGH) * reward)
        expected += float(losses.mean()) / len(answers)
    assert metrics(runs / "hook_train_data")[0]["loss/policy"] == pytest.approx(expected, rel=1e-4)


def test_a_log_function_sees_every_sample_once_and_what_it_raises_ends_no_step(runs: Path) -> None:
    known = [sample for sample in told(0) if sample.failure is None]
    assert _notes(runs, "rollout_log") == [[0, len(known), True], [1, len(known), True]]
    assert len(_notes(runs, "rollout_log", "notes-of-two")) == 2 * len(LAYOUTS)
    for run in ("hook_log", *(f"hook_log@{layout}" for layout in LAYOUTS)):
        first, second = metrics(runs / run)
        assert first["rollout/longest"] == max(sample.response_length for sample in known)
        assert "what" not in first
        assert "loss/policy" in second
    _assert_same(runs, "hook_log", "grpo")


def test_a_users_model_and_its_start_are_those_of_the_trainer(runs: Path) -> None:
    _assert_same(runs, "hook_model", "grpo")
    assert _notes(runs, "megatron_init") == [[1234, 1]]
    assert _notes(runs, "model_provider") == [[True, True, None]]
    assert True in _notes(runs, "forward")
    assert sorted(_notes(runs, "model_provider", "notes-of-two"))[:2] == [[False, True, None], [True, False, None]]


def test_a_hook_hears_whose_log_probs_are_next(runs: Path) -> None:
    assert _notes(runs, "before_log_prob") == [["", 1], ["ref_", 1]] * 2


_COMPARED = {"loss/policy", "loss/custom", "grad_norm", "critic/loss", "ratio/mean", "ratio/max", "ratio/std"}


def _case(folder: Path, name: str, sections: Sections) -> AlgorithmCase:
    placed = {
        section: {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in leaves.items()}
        for section, leaves in sections.items()
    }
    return AlgorithmCase(name, str(folder), str(folder / "model"), placed)


def _answers(runs: Path, network: Any = None) -> list[Answer]:
    """The first step's samples that have a reward, as transformers computes them in float64."""
    return _frozen_answers(runs) if network is None else _answers_of(runs, network)


@cache
def _frozen_answers(runs: Path) -> list[Answer]:
    return _answers_of(runs, AutoModelForCausalLM.from_pretrained(runs / "model").double())


def _answers_of(runs: Path, network: Any) -> list[Answer]:
    reference = AutoModelForCausalLM.from_pretrained(runs / "reference").double()
    return [Answer(network, reference, sample) for sample in told(0) if sample.reward is not None]


def _assert_statistics(found: dict[str, float], name: str, values: Tensor) -> None:
    assert found[f"{name}/mean"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert found[f"{name}/max"] == pytest.approx(values.max().item(), rel=1e-4)
    assert found[f"{name}/std"] == pytest.approx(values.std(correction=0).item(), rel=1e-4)


def _assert_same(runs: Path, run: str, other: str) -> None:
    for mine, theirs in zip(metrics(runs / run), metrics(runs / other), strict=True):
        for metric in set(mine) & _COMPARED:
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-6), metric
    expected = weights(runs / other / "trained")
    for name, weight in weights(runs / run / "trained").items():
        distance = (weight - expected[name]).norm() / expected[name].norm()
        assert distance < 1e-5, f"{name}: {distance:.2e}"


def _notes(runs: Path, name: str, folder: str = "notes") -> list[Any]:
    return [json.loads(line) for line in (runs / folder / f"{name}.jsonl").read_text().splitlines()]
