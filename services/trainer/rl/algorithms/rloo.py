"""RLOO: the baseline of an answer is the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.trainer.plan.batch import SampleFacts
from services.trainer.rl.algorithms.algorithm import Algorithm
from services.trainer.rl.algorithms.groups import group_rewards


class Rloo(Algorithm):
    """A sample's reward counts against the others of its group."""

    def rewards(self, samples: Sequence[SampleFacts]) -> dict[str, float]:
        return rloo_rewards(samples)


def rloo_rewards(samples: Sequence[SampleFacts]) -> dict[str, float]:
    """Returns by sample_id R - mean of the group's other rollouts; equal rewards, and a lone rollout, give exactly 0.

    Failed and unscored samples are outside the statistics and have 0.
    """
    found = {sample.sample_id: 0.0 for sample in samples}
    for group in group_rewards(samples):
        others = len(group.by_rollout) - 1
        if group.are_equal or not others:
            continue
        total = math.fsum(group.by_rollout.values())
        for sample_id, reward in group.by_sample.items():
            baseline = (total - group.by_rollout[group.rollout_of[sample_id]]) / others
            found[sample_id] = reward - baseline
    return found
