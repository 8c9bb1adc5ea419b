"""GRPO advantages: how much better an answer is than its siblings (Shao et al. 2024, arXiv:2402.03300, §4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.trajectory import Status
from services.trainer.batch import SampleFacts

EPSILON = 1e-6


def grpo_advantages(
    samples: Sequence[SampleFacts], *, normalize_rewards: bool, divide_by_std: bool
) -> dict[str, float]:
    """One advantage per sample_id, the same for all of its tokens: A = (R - mean_g) / (std_g + 1e-6).

    A group is all samples of one group_id, whatever its size and order; std is unbiased. Failed and unjudged samples
    are outside the statistics and have advantage 0. Without `divide_by_std` A = R - mean_g (Dr.GRPO,
    arXiv:2503.20783); without `normalize_rewards` A = R.
    """
    advantages = {sample.sample_id: 0.0 for sample in samples}
    for rewards in _rewards_by_group(samples).values():
        advantages |= _normalized(rewards, divide_by_std) if normalize_rewards else rewards
    return advantages


def _rewards_by_group(samples: Sequence[SampleFacts]) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.reward is not None and sample.status != Status.FAILED.value:
            groups.setdefault(sample.group_id, {})[sample.sample_id] = sample.reward
    return groups


def _normalized(rewards: Mapping[str, float], divide_by_std: bool) -> dict[str, float]:
    # The mean of equal numbers may differ from them in the last bit: such a group must give 0, not noise.
    if min(rewards.values()) == max(rewards.values()):
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(rewards.values()) / len(rewards)
    centered = {sample_id: reward - mean for sample_id, reward in rewards.items()}
    if not divide_by_std:
        return centered
    std = math.sqrt(math.fsum(c * c for c in centered.values()) / (len(rewards) - 1))
    return {sample_id: c / (std + EPSILON) for sample_id, c in centered.items()}
