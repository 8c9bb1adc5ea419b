"""Routing replay: tokens go to the experts that were chosen before, weighed by the router as it is now.

The choices here are random: none of them is what the router would take. Loss and gradient are those of the transformers
model in float64 whose gates are told the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trajectory import ROUTED_EXPERTS, Sample
from tests.long_forms import ALL
from tests.support.models.float64_reference import against_group
from tests.support.models.tiny_families import make_tiny
from tests.support.ranks.algorithm_cases import AlgorithmCase, told
from tests.support.ranks.rank_results import metrics, network, weights
from tests.support.ranks.ranks import run_cases

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TEMPERATURE, LOW, HIGH = 0.8, 0.8, 1.2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EP2, PP2 = {"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
ROLLOUTS = {"use_rollout_routing_replay": True}
RECORDED = {"use_routing_replay": True, "use_rollout_logprobs": False, "num_steps_per_rollout": 2}
Run = tuple[int, Mapping[str, Any], Mapping[str, Any]]
REPLAYED: dict[str, Run] = {
    "shared-prompts": (1, {}, {"packing": "shared_prompts"}),
    "ep2": (2, EP2, {"packing": "padded"}),
    "pp2-recomputed": (2, PP2 | FULL, {}),
    "cp2": (2, CP2, {"packing": "packed"}),
}
RECORDED_AGAIN: dict[str, Run] = {"recorded-pp2": (2, PP2 | FULL, RECORDED)}
OTHERS: dict[str, Run] = {
    "free": (1, {}, {}),
    "recorded": (1, {}, RECORDED),
    "not-recorded": (1, {}, RECORDED | {"use_routing_replay": False}),
}
if ALL:
    REPLAYED |= {
        "recomputed": (1, FULL, {}),
        "cp2-shared-prompts": (2, CP2, {"packing": "shared_prompts"}),
        "cp2-ep2-recomputed": (2, CP2 | EP2 | FULL, {"packing": "packed"}),
    }
    RECORDED_AGAIN |= {
        "recorded-recomputed": (1, FULL, RECORDED),
        "recorded-ep2": (2, EP2, RECORDED),
        "recorded-cp2": (2, CP2, RECORDED | {"packing": "packed"}),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    make_tiny(folder / "model", "qwen3_moe")
    replayed = {name: (ranks, megatron, train | ROLLOUTS) for name, (ranks, megatron, train) in REPLAYED.items()}
    cases = [
        AlgorithmCase(
            *(name, str(folder), str(folder / "model")),
            {"train": train, "megatron": {"lr": 0.03} | dict(megatron)},
            ranks,
        )
        for name, (ranks, megatron, train) in (replayed | RECORDED_AGAIN | OTHERS).items()
    ]
    run_cases(folder, 2, cases)
    return folder


@pytest.fixture(scope="module")
def expected(runs: Path) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and the routers' gradients of the first step."""
    model = network(runs / "model")
    samples = [sample for sample in told(0) if sample.reward is not None]
    trained = [sample for sample in samples if sample.loss_mask.any()]
    loss = torch.zeros((), dtype=torch.float64)
    for sample in trained:
        mask = torch.from_numpy(sample.loss_mask).double()
        ratio = (_log_probs(model, sample) - torch.from_numpy(sample.rollout_log_probs).double()).exp()
        advantage = against_group("grpo", sample, samples)
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)
        loss = loss + (per_token * mask).sum() / mask.sum() / len(samples)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    routers = {name: gradient for name, gradient in gradients.items() if name.endswith("mlp.gate.weight")}
    return loss.item(), norm.item(), routers


@pytest.mark.parametrize("run", REPLAYED)
def test_a_step_has_the_loss_and_gradient_of_the_engines_choice(
    runs: Path, expected: tuple[float, float, dict[str, Tensor]], run: str
) -> None:
    found = metrics(runs / run)[0]
    assert found["loss/policy"] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected[1], rel=1e-4)
    assert found["loss/policy"] != pytest.approx(metrics(runs / "free")[0]["loss/policy"], rel=1e-3)


def test_the_router_learns_how_to_weigh_what_it_did_not_choose(
    runs: Path, expected: tuple[float, float, dict[str, Tensor]]
) -> None:
    assert len(expected[2]) == 2
    before, after = weights(runs / "model"), weights(runs / "shared-prompts" / "trained")
    for name, gradient in expected[2].items():
        assert gradient.norm() > 0
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("run", RECORDED_AGAIN)
def test_what_was_chosen_for_old_log_probs_is_chosen_again_under_every_layout(runs: Path, run: str) -> None:
    for mine, theirs in zip(metrics(runs / run), metrics(runs / "recorded"), strict=True):
        for name in ("loss/policy", "grad_norm", "ratio/mean", "ratio/max"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_without_replay_some_tokens_go_elsewhere_once_the_router_has_moved(runs: Path) -> None:
    recorded, free = metrics(runs / "recorded")[0], metrics(runs / "not-recorded")[0]
    assert recorded["ratio/max"] != pytest.approx(free["ratio/max"], rel=1e-3)


def _log_probs(model: Any, sample: Sample) -> Tensor:
    tokens, start = torch.from_numpy(sample.tokens).long(), sample.prompt_length
    chosen = torch.from_numpy(sample.columns[ROUTED_EXPERTS].astype("int64"))
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = _Gate(block.mlp.gate, chosen[:, layer])
    logits = model(tokens[None, :-1]).logits[0, start - 1 :] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, tokens[start:, None])[:, 0]


class _Gate:
    """In the place of a gate's forward: it is told where tokens go."""

    def __init__(self, gate: Any, chosen: Tensor) -> None:
        self._gate, self._chosen = gate, chosen

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self._gate.weight.T
        own = logits.topk(self._chosen.shape[1], dim=-1).indices
        chosen = torch.where(self._chosen < 0, own, self._chosen)
        return logits, logits.gather(1, chosen).softmax(-1), chosen
