"""Samples with text, as a run's people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.trajectory import Failure, PolicyRange, Sample, Status


def answered(
    sample_id: str,
    prompt: str = "2 + 2 =",
    response: str = " 4",
    *,
    group_id: str = "g1",
    reward: float | None = 1.0,
    reward_parts: Mapping[str, float] | None = None,
    label: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    failure: Failure | None = None,
) -> Sample:
    """Three prompt tokens and two of a response; failed where a failure is given."""
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        index=0,
        rollout_id=sample_id,
        prompt=prompt,
        response=response,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.zeros(2, np.float32),
        status=Status.FAILED if failure else Status.COMPLETED,
        reward=None if failure else reward,
        reward_parts=reward_parts or {},
        scorer="math",
        scorer_version="7",
        failure=failure,
        label=label,
        metadata=metadata or {},
        policy_ranges=[PolicyRange(1, 0, 2)],
    )
