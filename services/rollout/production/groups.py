"""Works on one leased group, from prompt to put."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import HeadraceError
from headrace.job.schema.production import ContextLimit
from headrace.job.schema.run import TrackingSection
from headrace.job.schema.training import DistillationSection
from headrace.process.workers import WorkerError
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.rpc.retry import retry_until
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Failure, ModelBounds, PolicyRange, Sample, Status
from services.rollout.admission import EngineSlots
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.production.hooks import AllSamples, GroupFilter
from services.rollout.production.partial import PartialRollout, release_unscored, unscored
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import Sampler, SampleRequest, seed_of
from services.rollout.scoring import SampleScorer


class UntrainedSamples:
    """Appends to the run's sample log, off the loop, one group at a time."""

    def __init__(self, samples: SampleLog, max_bytes: int) -> None:
        self._log = samples
        self._max_bytes = max_bytes
        self._file: Path | None = None
        self._writing = asyncio.Lock()

    @classmethod
    def of(cls, config: TrackingSection, folder: Path | None, service: int | None = None) -> UntrainedSamples | None:
        """Returns None without a folder, or when the job wants none written. `service`: one of several that write."""
        max_bytes = config.sample_log_bytes
        return cls(SampleLog(folder, service), max_bytes) if folder and max_bytes else None

    async def write(self, samples: Sequence[Sample], dropped_reason: str | None = None) -> None:
        """Writes those of a group that failed, and all of a group that the filter dropped for this reason."""
        untrained = [
            Answer.of(sample, dropped_reason=dropped_reason)
            for sample in samples
            if dropped_reason is not None or sample.status is Status.FAILED
        ]
        if untrained:
            async with self._writing:
                await asyncio.to_thread(self._append, untrained)

    def _append(self, untrained: Sequence[Answer]) -> None:
        try:
            file = self._file or self._log.new_untrained_file()
            self._file = self._log.write_untrained(file, untrained, self._max_bytes)
        except OSError as error:  # what people read later is no reason to fail a group
            self._file = None
            log.warning("untrained_samples_not_written", samples=len(untrained), error=str(error))


class LeaseReturned(Exception):
    """The group is leased again later: with --partial-rollout from the tokens of `samples`."""

    def __init__(self, reason: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.samples = samples


class GroupFiltered(Exception):
    """The group is dropped, and another prompt takes its place in the batch."""

    def __init__(self, reason: str, rewards: Sequence[float] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rewards = rewards


# On-policy distillation's teacher: an SGLang server that gives its log-prob of each token of a response.
# The log-probs travel with the sample, as the column teacher_log_probs. A sample that the teacher cannot score is
# FAILED.

COLUMN = "teacher_log_probs"
_PATIENCE_SECONDS = 120.0


class Teacher:
    """`call_seconds` limits one sample's scoring, `patience_seconds` the wait for an absent server."""

    def __init__(self, url: str, *, call_seconds: float, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._client = EngineClient(url.rstrip("/"))
        self._call_seconds = call_seconds
        self._patience_seconds = patience_seconds

    @classmethod
    def of(cls, config: DistillationSection, *, call_seconds: float) -> Teacher | None:
        """Returns None when the job has no teacher that is served."""
        return None if config.opd_teacher_url is None else cls(config.opd_teacher_url, call_seconds=call_seconds)

    async def close(self) -> None:
        await self._client.close()

    async def mark(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples with their column; those that failed before stay as they are."""
        return await asyncio.gather(*(self._marked(sample) for sample in samples))

    async def _marked(self, sample: Sample) -> Sample:
        if sample.status is Status.FAILED:
            return sample
        try:
            return replace(sample, columns={**sample.columns, COLUMN: await self._log_probs(sample)})
        except HeadraceError as error:
            log.warning("teacher_failed", sample_id=sample.sample_id, reason=error.reason, error=error.message)
            return replace(sample, status=Status.FAILED, failure=Failure(f"TEACHER_{error.reason}", error.message))

    async def _log_probs(self, sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if not sample.response_length:
            return np.zeros(0, dtype=np.float32)
        found = await self._scored(sample.tokens.tolist())
        # Nothing predicts the first token of a response without a prompt, and nothing trains it.
        padded = [0.0, *found]
        return np.asarray(padded[len(padded) - sample.response_length :], dtype=np.float32)

    async def _scored(self, tokens: Sequence[int]) -> list[float]:
        """Raises errors that waiting cannot help at once, and Unavailable when waiting did not."""
        score = partial(self._client.score, tokens, cache_key="teacher", seconds=self._call_seconds)
        return await retry_until(time.monotonic() + self._patience_seconds, lambda _: score())


_STORED_AFTER_SECONDS = 5.0
"""A reward service that is restarted is back sooner."""
GroupResult = buffer_pb2.GroupPut | buffer_pb2.LeaseRelease


class GroupSampler:
    """Generates a group's samples side by side and has them scored together."""

    def __init__(
        self,
        encoder: PromptEncoder,
        sampler: Sampler,
        scorer: SampleScorer | None,
        params: SamplingParams,
        *,
        rollout_seed: int,
        max_prompt_tokens: int | None,
        context: ContextLimit | None,
        group_filter: GroupFilter | None = None,
        partial_rollout: PartialRollout | None = None,
        teacher: Teacher | None = None,
        bounds: ModelBounds | None = None,
        untrained_samples: UntrainedSamples | None = None,
        slots: EngineSlots | None = None,
        all_samples: AllSamples | None = None,
    ) -> None:
        """`slots` count the samples that engines are asked for."""
        self._encoder = encoder
        self._sampler = sampler
        self._scorer = scorer
        self._params = params
        self._rollout_seed = rollout_seed
        self._max_prompt_tokens = max_prompt_tokens
        self._context = context
        self._filter = group_filter
        self._partial = partial_rollout
        self._teacher = teacher
        self._bounds = bounds
        self._untrained_samples = untrained_samples
        self._slots = slots
        self._all_samples = all_samples

    @property
    def returns_partials(self) -> bool:
        """True when an interrupted group is released with its tokens."""
        return self._partial is not None

    @property
    def masks_partials(self) -> bool:
        """True when a later lease can go on with tokens of any age."""
        return self._partial is not None and self._partial.mask_offpolicy

    def oldest_version(self, lease: buffer_pb2.GroupLease) -> int:
        """Returns that of the oldest token of the group that would be trained."""
        return self._partial.oldest_version(lease) if self._partial else lease.policy_version

    async def sample(self, lease: buffer_pb2.GroupLease, return_partial: asyncio.Event | None = None) -> GroupResult:
        """Returns the lease's put (COMPLETE, DROPPED or FAILED), or its release.

        A lease is released when it was interrupted, and once when its finished samples have to wait for a scorer.
        """
        if waiting := unscored(lease):
            samples, since = waiting
            return await self._scored(lease, samples, waited_seconds=max(time.time() - since, 0.0))
        try:
            prompt = await self._encoder.off_loop(self._encoder.encode, lease.prompt)
        except HeadraceError as error:
            return _put(lease, buffer_pb2.PUT_OUTCOME_FAILED, failure=Failure(error.reason, error.message))
        if too_long := self._too_long(len(prompt.tokens)):
            return _put(lease, buffer_pb2.PUT_OUTCOME_DROPPED, failure=Failure("PROMPT_TOO_LONG", too_long))
        params = self._params.at_most(self._context.tokens - len(prompt.tokens)) if self._context else self._params
        begun = self._partial.begun(lease, prompt) if self._partial else {}
        requests = [
            replace(self._request(lease, prompt, params, index), begun=begun.get(index))
            for index in range(lease.n_samples)
        ]
        try:
            with self._slots.training(len(requests)) if self._slots else contextlib.nullcontext():
                made = await self._sampler.sample_all(requests, evaluation=False, return_partial=return_partial)
        except GroupFiltered as given_up:
            failure = Failure("FILTERED", given_up.reason)
            return _put(lease, buffer_pb2.PUT_OUTCOME_DROPPED, failure=failure, rewards=given_up.rewards)
        except LeaseReturned as given_back:
            return self._given_back(lease, given_back)
        samples = [_of_version(sample, lease.policy_version) for sample in made]
        if any(s.status is Status.ABORTED for s in samples):
            is_interrupted = return_partial is None or return_partial.is_set()
            why = None if is_interrupted or not self._partial else self._partial.why_not_again(lease, begun, samples)
            if why is None:
                return self._interrupted(lease, samples)
            samples = [_too_slow(sample, why) for sample in samples]
        samples = [self._bounded(sample) for sample in samples]
        if self._partial:
            samples = [self._partial.finished(sample, lease.policy_version) for sample in samples]
        return await self._stored_or_scored(lease, samples)

    def _bounded(self, sample: Sample) -> Sample:
        """Makes a sample FAILED whose tokens the model does not have."""
        if self._bounds is None or sample.status is Status.FAILED:
            return sample
        try:
            self._bounds.check(sample.sample_id, sample.tokens, sample.columns)
        except HeadraceError as error:
            return replace(sample, status=Status.FAILED, failure=Failure("NOT_OF_THE_MODEL", error.message))
        return sample

    def _given_back(self, lease: buffer_pb2.GroupLease, given_back: LeaseReturned) -> buffer_pb2.LeaseRelease:
        if self._partial and given_back.samples:
            return self._partial.release(lease, [_of_version(s, lease.policy_version) for s in given_back.samples])
        return buffer_pb2.LeaseRelease(lease_id=lease.lease_id, reason=given_back.reason)

    def _interrupted(self, lease: buffer_pb2.GroupLease, samples: list[Sample]) -> GroupResult:
        """Releases the group. Aborted samples, and those that fanned out with them, are never trained."""
        if self._partial:
            return self._partial.release(lease, samples)
        aborted = [sample.sample_id for sample in samples if sample.status is Status.ABORTED]
        failure = Failure("ABORTED", f"samples {aborted} were aborted: --partial-rollout would continue them")
        return _put(lease, buffer_pb2.PUT_OUTCOME_FAILED, failure=failure)

    async def _stored_or_scored(self, lease: buffer_pb2.GroupLease, samples: list[Sample]) -> GroupResult:
        """Releases the lease with finished samples whose scorer stays unreachable: no kill loses them then."""
        away = asyncio.Event()
        scoring = asyncio.create_task(self._scored(lease, samples, away=away))
        found_away = asyncio.create_task(away.wait())
        try:
            await asyncio.wait({scoring, found_away}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({scoring}, timeout=None if scoring.done() else _STORED_AFTER_SECONDS)
            if not scoring.done() and (release := release_unscored(lease, samples, time.time())):
                return release
            return await scoring
        finally:
            found_away.cancel()
            scoring.cancel()

    async def _scored(
        self,
        lease: buffer_pb2.GroupLease,
        samples: list[Sample],
        *,
        waited_seconds: float = 0.0,
        away: asyncio.Event | None = None,
    ) -> buffer_pb2.GroupPut:
        if self._teacher:
            samples = await self._teacher.mark(samples)
        if self._scorer:
            with tracing.span("rl.reward"):
                samples = await self._scorer.score(samples, waited_seconds=waited_seconds, away=away)
        put = await self._filtered(lease, samples)
        if self._untrained_samples:
            is_dropped = put.outcome == buffer_pb2.PUT_OUTCOME_DROPPED
            await self._untrained_samples.write(samples, put.failure.message if is_dropped else None)
        if self._all_samples:
            self._all_samples.add(samples, is_kept=put.outcome == buffer_pb2.PUT_OUTCOME_COMPLETE)
        return put

    async def _filtered(self, lease: buffer_pb2.GroupLease, samples: list[Sample]) -> buffer_pb2.GroupPut:
        """Returns the put of a scored group, as its filter wants it."""
        if all(s.status is Status.FAILED for s in samples):
            return _put(lease, buffer_pb2.PUT_OUTCOME_FAILED, failure=samples[0].failure)
        try:
            refusal = await self._filter.refusal(samples) if self._filter else None
        except WorkerError as error:
            failure = Failure("FILTER_FAILED", error.message)
            return _put(lease, buffer_pb2.PUT_OUTCOME_FAILED, failure=failure)
        if refusal:
            rewards = [sample.reward for sample in samples if sample.reward is not None]
            return _put(lease, buffer_pb2.PUT_OUTCOME_DROPPED, failure=refusal, rewards=rewards)
        return _put(lease, buffer_pb2.PUT_OUTCOME_COMPLETE, samples=samples)

    def _too_long(self, length: int) -> str | None:
        """Returns why a prompt of `length` tokens is dropped, or None."""
        if self._max_prompt_tokens is not None and length > self._max_prompt_tokens:
            return f"the prompt has {length:,} tokens: rollout_max_prompt_len is {self._max_prompt_tokens:,}"
        if self._context is not None and length >= self._context.tokens:
            return self._context.too_long(length)
        return None

    def _request(
        self, lease: buffer_pb2.GroupLease, prompt: EncodedPrompt, params: SamplingParams, index: int
    ) -> SampleRequest:
        return SampleRequest.of(
            lease.prompt,
            prompt,
            replace(params, seed=seed_of(self._rollout_seed, lease.group_id, lease.attempt, index)),
            sample_id=f"{request_prefix(lease)}{index}",
            group_id=lease.group_id,
            index=index,
        )


def request_prefix(lease: buffer_pb2.GroupLease) -> str:
    """Returns how the ids of the group's samples, and of their requests, begin."""
    return f"{lease.group_id}/{lease.attempt}/"


def _too_slow(sample: Sample, why: str) -> Sample:
    """Makes an unfinished sample FAILED."""
    if sample.status is not Status.ABORTED:
        return sample
    message = f"it had {sample.response_length} tokens when its time was over; {why}"
    return replace(sample, status=Status.FAILED, failure=Failure("DEADLINE_EXCEEDED", message))


def _of_version(sample: Sample, policy_version: int) -> Sample:
    """Counts tokens of unknown weights (a hook's, or a data set's) as the lease's version."""
    if sample.policy_ranges or not sample.response_length:
        return sample
    return replace(sample, policy_ranges=(PolicyRange(policy_version, 0, sample.response_length),))


def _put(
    lease: buffer_pb2.GroupLease,
    outcome: buffer_pb2.PutOutcome.ValueType,
    *,
    samples: list[Sample] | None = None,
    failure: Failure | None = None,
    rewards: Sequence[float] = (),
) -> buffer_pb2.GroupPut:
    return buffer_pb2.GroupPut(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        outcome=outcome,
        samples=[sample.pack() for sample in samples or ()],
        failure=sample_pb2.Failure(reason=failure.reason, message=failure.message) if failure else None,
        rewards=rewards,
    )
