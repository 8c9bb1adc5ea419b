"""Partial rollout: an interrupted group is returned to the ledger as it is, and its next producer continues it.

A sample is finished, partial, or missing. Finished ones are taken as they are, partial ones are continued from their
tokens, missing ones are generated. Tokens of policies before the lease's are trained while they are fresh enough, or
masked (`mask_offpolicy`): then their age does not count. Without a mask, tokens too old to be trained are sampled
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import HeadraceError
from headrace.limits import MAX_PARTIAL_BYTES
from headrace.rpc.log import log
from headrace.trajectory import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS, Sample, Status
from services.rollout.engine.api import Generation
from services.rollout.engine.replies import EngineCounts, Finish, SamplingMask
from services.rollout.production.prompts import EncodedPrompt

_FINISH = {Status.COMPLETED: Finish.STOP, Status.TRUNCATED: Finish.LENGTH, Status.ABORTED: Finish.ABORT}


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """The job's options for partial rollout."""

    mask_offpolicy: bool
    max_staleness: int

    def begun(self, lease: buffer_pb2.GroupLease, prompt: EncodedPrompt) -> Mapping[int, Sample]:
        """Returns the samples of an earlier lease that can be continued, by index."""
        found: dict[int, Sample] = {}
        for packed in lease.partial_samples:
            try:
                sample = Sample.unpack(packed)
            except HeadraceError as error:
                log.warning("partial_sample_unreadable", group_id=lease.group_id, error=error.message)
                continue
            if self._fits(sample, lease.policy_version, prompt):
                found[sample.index] = sample
        return found

    def _fits(self, sample: Sample, policy_version: int, prompt: EncodedPrompt) -> bool:
        if tuple(sample.tokens[: sample.prompt_length].tolist()) != prompt.tokens:
            return False  # another tokenizer or chat template made it
        oldest = min((r.policy_version for r in sample.policy_ranges), default=policy_version)
        return self.mask_offpolicy or self._is_fresh(oldest, policy_version)

    def _is_fresh(self, version: int, policy_version: int) -> bool:
        return policy_version - version <= self.max_staleness

    def oldest_version(self, lease: buffer_pb2.GroupLease) -> int:
        """Returns the policy version of the oldest token that a group of this lease would be trained with."""
        versions = [r.policy_version for sample in lease.partial_samples for r in sample.envelope.policy_ranges]
        fresh = [] if self.mask_offpolicy else [v for v in versions if self._is_fresh(v, lease.policy_version)]
        return min((*fresh, lease.policy_version))

    def finished(self, sample: Sample, policy_version: int) -> Sample:
        """Returns the sample to put: tokens of policies before the lease's are masked if the job says so."""
        if not self.mask_offpolicy or all(r.policy_version >= policy_version for r in sample.policy_ranges):
            return sample
        ranges = tuple(replace(r, masked=r.policy_version < policy_version) for r in sample.policy_ranges)
        loss_mask, log_probs = sample.loss_mask.copy(), sample.rollout_log_probs.copy()
        for old in (r for r in ranges if r.masked):
            loss_mask[old.start : old.end] = 0
            log_probs[old.start : old.end] = 0.0
        return replace(sample, policy_ranges=ranges, loss_mask=loss_mask, rollout_log_probs=log_probs)

    def why_not_again(
        self, lease: buffer_pb2.GroupLease, begun: Mapping[int, Sample], samples: Sequence[Sample]
    ) -> str | None:
        """Returns why a group whose time is over is not released once more, or None.

        Each release has more tokens than the one before, so that no group is leased without end.
        """
        if len(begun) < len(lease.partial_samples):
            return (
                "its earlier tokens were too old to be continued, and it did not end in time without them: raise "
                "--generate-timeout-seconds or --max-staleness, or pass --mask-offpolicy-in-partial-rollout"
            )
        before = sum(sample.response_length for sample in begun.values())
        if sum(sample.response_length for sample in _continuable(samples)) <= before:
            return "none of its group's samples had a new token: engines are stuck or overloaded (headrace status)"
        return None

    def release(self, lease: buffer_pb2.GroupLease, samples: Sequence[Sample]) -> buffer_pb2.LeaseRelease:
        """Releases the lease with all samples that can be continued."""
        kept = _continuable(samples)
        tokens = sum(sample.response_length for sample in kept)
        return buffer_pb2.LeaseRelease(
            lease_id=lease.lease_id,
            partial_samples=[sample.pack() for sample in kept],
            reason=f"interrupted with {tokens} tokens of {len(kept)} samples",
        )


def _continuable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that fanned out cannot be continued."""
    count = Counter(sample.index for sample in samples)
    return [s for s in samples if s.status in _FINISH and s.response_length and count[s.index] == 1]


AWAITS_SCORE = "awaits_score_since"
"""The key in `hook_fields` of finished samples that are released for want of a scorer: seconds since 1970."""


def release_unscored(
    lease: buffer_pb2.GroupLease, samples: Sequence[Sample], now: float
) -> buffer_pb2.LeaseRelease | None:
    """Releases the lease with finished samples, so that the ledger holds them. None for more than it takes."""
    packed = [replace(each, hook_fields={**each.hook_fields, AWAITS_SCORE: now}).pack() for each in samples]
    if sum(each.ByteSize() for each in packed) > MAX_PARTIAL_BYTES:
        return None
    reason = f"{len(samples)} finished samples wait for their scores"
    return buffer_pb2.LeaseRelease(lease_id=lease.lease_id, partial_samples=packed, reason=reason)


def unscored(lease: buffer_pb2.GroupLease) -> tuple[list[Sample], float] | None:
    """The finished samples of an earlier lease that wait for their scores, and since when. None: there are none."""
    try:
        samples = [Sample.unpack(packed) for packed in lease.partial_samples]
    except HeadraceError:
        return None  # `begun` says so
    since = [each.hook_fields.get(AWAITS_SCORE) for each in samples]
    times = [each for each in since if isinstance(each, int | float)]
    if len(times) < len(samples) or {each.index for each in samples} != set(range(lease.n_samples)):
        return None
    fields = [{key: each.hook_fields[key] for key in each.hook_fields if key != AWAITS_SCORE} for each in samples]
    return [replace(each, hook_fields=own) for each, own in zip(samples, fields, strict=True)], min(times)


def generation_of(sample: Sample) -> Generation:
    """Returns the sample's response so far."""
    experts, mask = sample.columns.get(ROUTED_EXPERTS), sample.columns.get(SAMPLING_MASK)
    return Generation(
        tokens=tuple(sample.tokens[sample.prompt_length :].tolist()),
        log_probs=tuple(np.asarray(sample.rollout_log_probs, dtype=np.float64).tolist()),
        finish=_FINISH[sample.status],
        policy_ranges=tuple(sample.policy_ranges),
        routed_experts=None if experts is None else experts.astype("<i4").tobytes(),
        counts=EngineCounts.of(sample),
        sampling_mask=None if mask is None else SamplingMask(mask, sample.columns[SAMPLING_MASK_COUNTS]),
    )
