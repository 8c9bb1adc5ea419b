"""GRPO's advantages: a sample's reward against those of its group.

A = (R − mean_g) / (std_g + 1e-6), std unbiased; every token of the sample has the same A.
Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; without the division: Liu et al. 2025, Dr. GRPO, arXiv:2503.20783.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from headrace.trajectory import Status
from services.trainer.batch import SampleFacts

_EPSILON = 1e-6


def grpo_advantages(
    samples: Sequence[SampleFacts], *, normalize_rewards: bool, divide_by_std: bool
) -> dict[str, float]:
    """Sample id → advantage. Groups are told apart by id and may be of any size.

    Equal rewards give exactly 0. Failed and unjudged samples are in no statistics and get 0.
    """
    groups: dict[str, list[SampleFacts]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    found: dict[str, float] = {}
    for members in groups.values():
        judged = {s.sample_id: s.reward for s in members if s.reward is not None and s.status != Status.FAILED.value}
        found |= {s.sample_id: 0.0 for s in members}
        found |= _normalized(judged, divide_by_std=divide_by_std) if normalize_rewards else judged
    return found


def _normalized(rewards: dict[str, float], *, divide_by_std: bool) -> dict[str, float]:
    values = list(rewards.values())
    # Asked for before any arithmetic: a mean of equal floats can miss them by a rounding, and 1e-17/1e-6 is no zero.
    if all(value == values[0] for value in values):
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(values) / len(values)
    scale = 1.0
    if divide_by_std:
        scale = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) + _EPSILON
    return {sample_id: (reward - mean) / scale for sample_id, reward in rewards.items()}
