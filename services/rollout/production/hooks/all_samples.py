"""Shows a user's function all samples of a step: of the groups that are put, and of those that the filter dropped.

consumes: scored groups; waits for: a step's worth of kept ones, or many in all; produces: calls in a worker, one at a
time. While one runs, groups gather for the next; the oldest are left out, with a warning, where it takes too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.background import kept_running
from headrace.errors import ConfigError
from headrace.hooks import HookArgs, to_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.all_samples import load_all_samples, run_all_samples
from headrace.job.schema.production import RolloutSection
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Sample
from services.rollout.metrics import RolloutMetrics

_LOAD_SECONDS = 120.0
_CALL_SECONDS = 300.0
_MOST_STEPS = 8
"""The number of steps whose groups may gather, kept and dropped ones."""


class AllSamples:
    """Calls the function at `path`; its failure is logged, and costs no sample."""

    def __init__(self, path: str, args: HookArgs, metrics: RolloutMetrics, *, groups_per_step: int) -> None:
        self._path = path
        self._args = args
        self._metrics = metrics
        self._groups_per_step = groups_per_step
        self._pool = WorkerPool(1)
        self._groups: list[list[HookSample]] = []
        self._num_kept = 0
        self._is_due = asyncio.Event()
        self._calling: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: RolloutSection, args: HookArgs, metrics: RolloutMetrics) -> AllSamples | None:
        """Returns None when the job names no function."""
        path = config.rollout_all_samples_process_path
        return cls(path, args, metrics, groups_per_step=config.rollout_batch_size or 1) if path else None

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        try:
            await self._pool.run(load_all_samples, self._path, timeout_seconds=_LOAD_SECONDS, name=f"hook {self._path}")
        except WorkerError as error:
            raise ConfigError(error.message, field="rollout.rollout_all_samples_process_path") from error
        work = kept_running("show all samples", self._run, self._metrics.background_work_ended)
        self._calling = asyncio.create_task(work)

    async def close(self) -> None:
        """Ends a call that runs."""
        if self._calling:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)
        await self._pool.close()

    def add(self, samples: Sequence[Sample], *, is_kept: bool) -> None:
        """Takes one scored group."""
        most = _MOST_STEPS * self._groups_per_step
        if len(self._groups) >= most:
            log.warning("all_samples_left_out", hook=self._path, groups=1, most=most)
            del self._groups[0]
        self._groups.append([to_hook(sample) for sample in samples])
        self._num_kept += is_kept
        if self._num_kept >= self._groups_per_step or len(self._groups) >= most:
            self._is_due.set()

    async def _run(self) -> None:
        while True:
            await self._is_due.wait()
            groups, self._groups, self._num_kept = self._groups, [], 0
            self._is_due.clear()
            try:
                await self._pool.run(
                    run_all_samples,
                    self._path,
                    self._args,
                    groups,
                    timeout_seconds=_CALL_SECONDS,
                    name=f"hook {self._path}",
                )
            except WorkerError as error:
                log.warning("hook_failed", hook=self._path, groups=len(groups), message=error.message)
