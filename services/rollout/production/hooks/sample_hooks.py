"""Shows each generated sample to the user's functions before it is scored, and takes back what they made of it.

A sample that a function fails on, or makes unusable, is a failure of its own. Samples that were aborted or have failed
are not shown: the first will be continued, and the others hold no response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import ConfigError, HeadraceError
from headrace.hooks import HookArgs, from_hook, to_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.failure import call_failure
from headrace.hooks.finished import require_finished
from headrace.hooks.sample_hook import load_sample_hook, run_sample_hooks
from headrace.job.schema.production import RolloutSection
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample, Status
from headrace.wire.limits import MAX_ID_CHARACTERS
from services.rollout.production.sampling import Sampler, SampleRequest

_WORKERS = 2
_LOAD_SECONDS = 120.0
_CALL_SECONDS = 60.0
_SHOWN = (Status.COMPLETED, Status.TRUNCATED)


class SampleHooks:
    """The functions at `paths`, in their order."""

    def __init__(self, paths: Sequence[str], args: HookArgs) -> None:
        self._paths = tuple(paths)
        self._args = args
        self._name = f"hook {', '.join(paths)}"
        self._pool = WorkerPool(_WORKERS)

    @classmethod
    def of(cls, config: RolloutSection, args: HookArgs) -> SampleHooks | None:
        """Returns None when the job names no function."""
        return cls(config.rollout_sample_hook_path, args) if config.rollout_sample_hook_path else None

    async def start(self) -> None:
        """Raises ConfigError when a function cannot be loaded or takes other arguments."""
        for path in self._paths:
            try:
                await self._pool.run(load_sample_hook, path, timeout_seconds=_LOAD_SECONDS, name=f"hook {path}")
            except WorkerError as error:
                raise ConfigError(error.message, field="rollout.rollout_sample_hook_path") from error

    async def close(self) -> None:
        await self._pool.close()

    async def show(self, sample: Sample, *, evaluation: bool) -> Sample:
        """Returns the sample as the functions leave it."""
        if sample.status not in _SHOWN:
            return sample
        try:
            changed = await self._pool.run(
                run_sample_hooks,
                self._paths,
                self._args,
                to_hook(sample),
                evaluation,
                timeout_seconds=_CALL_SECONDS,
                name=self._name,
            )
            return self._taken_back(sample, changed)
        except (WorkerError, HeadraceError) as error:
            failure = call_failure(error)
        except Exception as error:  # noqa: BLE001  # what a user's function returned may be anything
            message = f"what {self._name} returned cannot be used: {type(error).__name__}: {error}"
            failure = Failure("HOOK_INVALID", message)
        log.warning("hook_failed", hook=self._name, sample_id=sample.sample_id, message=failure.message)
        return replace(sample, status=Status.FAILED, failure=failure)

    def _taken_back(self, sample: Sample, changed: HookSample) -> Sample:
        """Keeps the token ranges of the policy's versions where the response is as long as before."""
        require_finished(self._name, changed)
        is_as_long = changed.response_length == sample.response_length
        taken = from_hook(
            changed,
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            index=sample.index,
            rendered_prompt=sample.prompt,
            policy_ranges=sample.policy_ranges if is_as_long else (),
            sampling_params=dict(sample.sampling_params),
        )
        before = to_hook(sample).reward
        if changed.reward == before:
            return replace(taken, reward=sample.reward, reward_parts=sample.reward_parts, scorer=sample.scorer)
        if changed.reward is None:
            return taken
        parts = changed.reward if isinstance(changed.reward, dict) else {}
        scorer = self._name[-MAX_ID_CHARACTERS:]
        return replace(taken, reward=changed.get_reward_value(self._args), reward_parts=parts, scorer=scorer)


class HookedSampler:
    """A sampler whose samples are those of another one, as the functions leave them."""

    def __init__(self, sampler: Sampler, hooks: SampleHooks) -> None:
        self._sampler = sampler
        self._hooks = hooks

    @property
    def in_flight(self) -> int:
        return self._sampler.in_flight

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns the samples of all requests, each shown to the functions once."""
        made = await self._sampler.sample_all(requests, evaluation=evaluation, return_partial=return_partial)
        return await asyncio.gather(*(self._hooks.show(sample, evaluation=evaluation) for sample in made))
