"""The specification's advantages and losses in float64, on the model that transformers makes of a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.images import IMAGE_GRIDS, PIXEL_VALUES
from headrace.trajectory import Sample

TEMPERATURE, LOW, HIGH, GAMMA, LAMBDA, KL_COEF, OPD_COEF = 0.8, 0.8, 1.2, 0.9, 0.7, 0.2, 0.3


class Answer:
    """A sample under a network and a reference, in float64."""

    def __init__(self, network: Any, reference: Any, sample: Sample) -> None:
        self.sample = sample
        self.mask = torch.from_numpy(sample.loss_mask).double()
        self.old = torch.from_numpy(sample.rollout_log_probs).double()
        self.teacher = torch.from_numpy(sample.columns["teacher_log_probs"]).double()
        self.log_probs = log_probs_of(network, sample)
        with torch.no_grad():
            self.reference = log_probs_of(reference, sample)

    @property
    def ratio(self) -> Tensor:
        return (self.log_probs - self.old).exp()


def log_probs_of(network: Any, sample: Sample, temperature: float = TEMPERATURE) -> Tensor:
    tokens = torch.from_numpy(sample.tokens).long()
    start, images = sample.prompt_length, _images_of(network, sample, tokens)
    logits = network(tokens[None], **images).logits[0, start - 1 : -1].double()
    table = (logits / temperature).log_softmax(-1)
    found: Tensor = table.gather(1, tokens[start:, None])[:, 0]
    return found


def _images_of(network: Any, sample: Sample, tokens: Tensor) -> dict[str, Tensor]:
    if PIXEL_VALUES not in sample.columns:
        return {}
    return {
        "pixel_values": torch.from_numpy(sample.columns[PIXEL_VALUES]).double(),
        "image_grid_thw": torch.from_numpy(sample.columns[IMAGE_GRIDS]),
        "mm_token_type_ids": (tokens[None] == network.config.image_token_id).int(),
    }


def trained(answers: list[Answer]) -> list[Answer]:
    return [a for a in answers if a.mask.any()]


def clipped(answer: Answer, advantage: Tensor) -> Tensor:
    return torch.maximum(-answer.ratio * advantage, -answer.ratio.clamp(LOW, HIGH) * advantage)


def gspo(answer: Answer, advantage: Tensor) -> Tensor:
    ratio = ((answer.log_probs - answer.old) * answer.mask).sum().div(answer.mask.sum()).exp()
    return torch.maximum(-ratio * advantage, -ratio.clamp(LOW, HIGH) * advantage)


def cispo(answer: Answer, advantage: Tensor) -> Tensor:
    return -answer.ratio.detach().clamp(LOW, HIGH) * advantage * answer.log_probs


def advantages_of(name: str, answers: list[Answer]) -> list[Tensor]:
    """SPEC.md §5, one tensor a sample; old log-probs are the engine's."""
    samples = [a.sample for a in answers]
    rewards = [against_group(name, sample, samples) for sample in samples]
    token: Callable[[Answer, float], Tensor] = {
        "reinforce_plus_plus": lambda a, r: _discounted(a, _token_rewards(a, r), GAMMA),
        "reinforce_plus_plus_baseline": lambda a, r: r - KL_COEF * (a.old - a.reference),
        "ppo": lambda a, r: _discounted(a, _token_rewards(a, r), GAMMA * LAMBDA),
        "opd_sglang": lambda a, r: r - OPD_COEF * (a.old - a.teacher),
        "opd_megatron": lambda a, r: r - OPD_COEF * (a.old - a.reference),
    }.get(name, lambda a, r: r + 0 * a.old)
    found = [token(a, r) for a, r in zip(answers, rewards, strict=True)]
    if name.startswith("reinforce"):
        flat = torch.cat([f[a.mask > 0] for f, a in zip(found, answers, strict=True)])
        found = [(f - flat.mean()) / (flat.var() + 1e-8).sqrt() for f in found]
    return found


def against_group(name: str, sample: Sample, samples: list[Sample]) -> float:
    """A sample's reward as the estimator compares it with the others of its group."""
    reward = float(sample.reward or 0.0)
    group = [float(s.reward or 0.0) for s in samples if s.group_id == sample.group_id]
    if name in ("reinforce_plus_plus", "ppo"):
        return reward
    rewards = torch.tensor(group, dtype=torch.float64)
    if name == "rloo":
        return float(reward - (rewards.sum() - reward) / (len(group) - 1)) if len(group) > 1 else 0.0
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return float(reward - rewards.mean())
    return float((reward - rewards.mean()) / (rewards.std() + 1e-6)) if len(group) > 1 else 0.0


def _token_rewards(answer: Answer, reward: float) -> Tensor:
    found = -KL_COEF * (answer.old - answer.reference) * answer.mask
    if answer.mask.any():
        found[int(answer.mask.nonzero()[-1])] += reward
    return found


def _discounted(answer: Answer, rewards: Tensor, factor: float) -> Tensor:
    """Over trained tokens; with a critic of zeros GAE is the same sum with factor γλ."""
    found, total = torch.zeros_like(rewards), 0.0
    for t in reversed(answer.mask.nonzero()[:, 0].tolist()):
        total = float(rewards[t]) + factor * total
        found[t] = total
    return found
