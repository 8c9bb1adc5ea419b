"""Between the frozen Sample of the wire and the mutable one of hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import InvalidArgument
from headrace.hooks.sample import Sample
from headrace.trajectory import ROUTED_EXPERTS, Failure, PolicyRange, Status
from headrace.trajectory import Sample as WireSample


def to_hook(sample: WireSample, group_index: int | None = None) -> Sample:
    """The sample as hooks see it; arrays become lists."""
    teacher = sample.columns.get("teacher_log_probs")
    return Sample(
        group_index=group_index,
        index=sample.index,
        prompt=sample.prompt,
        tokens=sample.tokens.tolist(),
        response=sample.response,
        response_length=sample.response_length,
        label=sample.label,
        reward=dict(sample.reward_parts) or sample.reward,
        loss_mask=sample.loss_mask.tolist(),
        weight_versions=[str(r.policy_version) for r in sample.policy_ranges],
        rollout_log_probs=sample.rollout_log_probs.tolist(),
        rollout_routed_experts=sample.columns.get(ROUTED_EXPERTS),
        teacher_log_probs=None if teacher is None else teacher.tolist(),
        status=Sample.Status(sample.status.value),
        metadata=dict(sample.metadata),
        train_metadata=dict(sample.train_metadata) or None,
        rollout_id=sample.rollout_id or None,
        failure_reason=sample.failure.message if sample.failure else None,
    )


def from_hook(
    sample: Sample,
    *,
    sample_id: str,
    group_id: str,
    index: int,
    policy_ranges: Sequence[PolicyRange] = (),
    sampling_params: dict[str, Any] | None = None,
) -> WireSample:
    """The sample as it travels, without its reward. Raises InvalidArgument for contradictions, naming the field.

    Without `policy_ranges` the oldest of the sample's weight_versions counts for all of its response: a hook keeps the
    versions of its requests, not their token ranges, and staleness must not be understated.
    """
    length = sample.response_length
    if length > len(sample.tokens):
        raise InvalidArgument(f"sample {sample_id}: response_length is {length} with {len(sample.tokens)} tokens")
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    return WireSample(
        sample_id=sample_id,
        group_id=group_id,
        index=index,
        rollout_id=sample.rollout_id or sample_id,
        prompt=sample.prompt if isinstance(sample.prompt, str) else _joined(sample.prompt),
        response=sample.response,
        tokens=np.asarray(sample.tokens, dtype=np.int32),
        loss_mask=np.zeros(length, np.uint8) if sample.remove_sample else np.asarray(mask, dtype=np.uint8),
        rollout_log_probs=_log_probs(sample, sample_id),
        status=Status(sample.status.value),
        failure=_failure(sample),
        label=sample.label,
        metadata=sample.metadata,
        train_metadata=sample.train_metadata or {},
        sampling_params=sampling_params or {},
        policy_ranges=tuple(policy_ranges) or _oldest(sample),
        tags=_tags(sample),
        columns=_columns(sample),
    )


def _log_probs(sample: Sample, sample_id: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    if sample.rollout_log_probs is None:
        if sample.response_length == 0:
            return np.zeros(0, np.float32)
        raise InvalidArgument(
            f"sample {sample_id}: rollout_log_probs is None for {sample.response_length} response tokens: ask the "
            "engine with return_logprob and append them; tokens that the policy did not sample "
            "take 0.0 and a loss_mask of 0"
        )
    return np.asarray(sample.rollout_log_probs, dtype=np.float32)


def _failure(sample: Sample) -> Failure | None:
    if sample.status is not Sample.Status.FAILED:
        return None
    return Failure("HOOK_FAILED", sample.failure_reason or "the generate function set the status to FAILED")


def _oldest(sample: Sample) -> tuple[PolicyRange, ...]:
    if not sample.weight_versions or not sample.response_length:
        return ()
    return (PolicyRange(min(int(v) for v in sample.weight_versions), 0, sample.response_length),)


def _columns(sample: Sample) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if sample.teacher_log_probs is not None:
        columns["teacher_log_probs"] = np.asarray(sample.teacher_log_probs, dtype=np.float32)
    if sample.rollout_routed_experts is not None:
        columns[ROUTED_EXPERTS] = np.asarray(sample.rollout_routed_experts, dtype=np.int16)
    return columns


def _tags(sample: Sample) -> dict[str, str]:
    tags = {"non_generation_seconds": f"{sample.non_generation_time:g}"} if sample.non_generation_time else {}
    for name, info, empty in (
        ("spec_info", sample.spec_info, Sample.SpecInfo()),
        ("prefix_cache_info", sample.prefix_cache_info, Sample.PrefixCacheInfo()),
    ):
        if info != empty:
            tags |= {f"{name}.{key}": str(value) for key, value in vars(info).items()}
    return tags


def _joined(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
