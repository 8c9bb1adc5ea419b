"""Dynamic sampling: a user's function selects the groups worth training; the others are dropped and replaced."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import ConfigError
from headrace.hooks import HookArgs, to_hook
from headrace.hooks.filter import ALL_REWARDS_ARE, load_filter, run_filter
from headrace.job.schema.production import RolloutSection
from headrace.process.workers import WorkerError, WorkerPool
from headrace.trajectory import FILTERED, Failure, Sample

_LOAD_SECONDS = 120.0
_CALL_SECONDS = 30.0


class GroupFilter:
    """Runs the function in a worker process, because it may be slow."""

    def __init__(self, path: str, args: HookArgs, *, seconds: float = _CALL_SECONDS) -> None:
        self._path = path
        self._args = args
        self._seconds = seconds
        self._pool = WorkerPool(1)

    @classmethod
    def of(cls, config: RolloutSection, args: HookArgs) -> GroupFilter | None:
        """Returns None when the job names no function."""
        path = config.dynamic_sampling_filter_path
        return cls(path, args) if path else None

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        try:
            await self._pool.run(load_filter, self._path, timeout_seconds=_LOAD_SECONDS, name=f"hook {self._path}")
        except WorkerError as error:
            raise ConfigError(error.message, field="rollout.dynamic_sampling_filter_path") from error

    async def close(self) -> None:
        await self._pool.close()

    async def refusal(self, samples: Sequence[Sample]) -> Failure | None:
        """Returns why the group is dropped, or None when it is stored. Raises WorkerError when the function fails."""
        keep, reason = await self._pool.run(
            run_filter,
            self._path,
            self._args,
            [to_hook(sample) for sample in samples],
            timeout_seconds=self._seconds,
            name=f"hook {self._path}",
        )
        return None if keep else Failure(FILTERED, reason or self._own_reason(samples))

    def _own_reason(self, samples: Sequence[Sample]) -> str:
        """What is said of a group whose filter gave no reason."""
        rewards = {sample.reward for sample in samples if sample.reward is not None}
        return f"{ALL_REWARDS_ARE}{rewards.pop()}" if len(rewards) == 1 else f"{self._path} dropped it"
