"""GRPO: how much better an answer is than its siblings (Shao et al. 2024, arXiv:2402.03300, §4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.algorithm import Algorithm
from services.trainer.rl.algorithms.groups import group_rewards

EPSILON = 1e-6


class Grpo(Algorithm):
    """A sample's reward counts against those of its group."""

    def rewards(self, samples: Sequence[SampleFacts]) -> dict[str, float]:
        if self.config.disable_rewards_normalization:
            return super().rewards(samples)
        return grpo_rewards(samples, divide_by_std=not self.config.disable_grpo_std_normalization)


def grpo_rewards(samples: Sequence[SampleFacts], *, divide_by_std: bool) -> dict[str, float]:
    """Returns by sample_id (R - mean_g) / (std_g + 1e-6); equal rewards give exactly 0.

    A group is all samples of one group_id, whatever its size and order; std is unbiased. A sample of a rollout that
    fanned out weighs 1 / the rollout's samples in both. No result exceeds √n in a group of n samples: the whole group
    is scaled down where one would. Failed and unscored samples are outside the statistics and have 0. Without
    `divide_by_std` it is R - mean_g: Dr.GRPO (Liu et al. 2025, arXiv:2503.20783) and the baseline of
    REINFORCE++-baseline (arXiv:2501.03262).
    """
    found = {sample.sample_id: 0.0 for sample in samples}
    for group in group_rewards(samples):
        if group.are_equal:
            continue
        mean = group.mean
        scale = max(group.std + EPSILON, group.least_scale) if divide_by_std else 1.0
        found |= {sample_id: (reward - mean) / scale for sample_id, reward in group.by_sample.items()}
    return found
