"""A rollout function as the producer's sampler: it is called for a step's groups, one call after another.

consumes: leased groups of the producer; waits for: a step's worth of them, or fewer where the ledger lets out no more;
produces: each group's samples, or how it ends without. States: built → started → closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.background import kept_running
from headrace.errors import ConfigError, HeadraceError
from headrace.hooks import HookArgs
from headrace.hooks.failure import call_failure
from headrace.hooks.rollout.function import load_rollout, run_rollout
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Sample
from services.rollout.engine.activity import Activity
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks.hook_samples import HookSamples
from services.rollout.production.sampling import SampleRequest
from services.rollout.rollout_function.desk import DataSourceDesk
from services.rollout.rollout_function.leased_groups import LeasedGroups
from services.rollout.rollout_function.step_call import StepCall

_LOAD_SECONDS = 120.0


class StepSampler:
    """Calls the function at `path` in one worker process, which lives on between calls.

    `next_step` is asked before each call, for its `rollout_id`.
    """

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        groups: LeasedGroups,
        params: SamplingParams,
        next_step: Callable[[], Awaitable[int]],
        *,
        groups_per_step: int,
        seconds: float,
        activity: Activity,
        warn: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._path = path
        self._args = args
        self._weights = weights
        self._groups = groups
        self._params = params
        self._next_step = next_step
        self._groups_per_step = groups_per_step
        self._seconds = seconds
        self._activity = activity
        self._ended = ended
        self._samples = HookSamples(path, args, weights, warn)
        self._desk = DataSourceDesk()
        self._pool = WorkerPool(1)
        self.in_flight = 0
        self._calling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        try:
            await self._pool.run(load_rollout, self._path, timeout_seconds=_LOAD_SECONDS, name=f"hook {self._path}")
        except WorkerError as error:
            raise ConfigError(error.message, field="rollout.rollout_function_path") from error
        await self._desk.start()
        self._calling = asyncio.create_task(kept_running("call the rollout function", self._run, self._ended))

    async def close(self) -> None:
        """Ends the running call; its groups are given back."""
        if self._calling:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)
        await self._pool.close()
        await self._desk.close()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Waits until a call has ended the group of the requests. Raises GivenBack or GivenUp for one without samples.

        Raises Unavailable when weights were refused meanwhile: none of the samples may be stored.
        """
        self.in_flight += len(requests)
        try:
            return await self._groups.samples(requests)
        finally:
            self.in_flight -= len(requests)

    async def _run(self) -> None:
        while True:
            await self._step(await self._groups.enough(self._groups_per_step))

    async def _step(self, num_groups: int) -> None:
        rollout_id = await self._rollout_id()
        call = StepCall(self._path, self._groups, self._samples, self._weights, self._activity)
        work = (self._path, self._call_args(num_groups), rollout_id, self._params.for_engine())
        log.info("rollout_function_called", hook=self._path, rollout_id=rollout_id, groups=num_groups)
        try:
            async with self._desk.opened(call) as desk:
                report = await self._pool.run(
                    run_rollout, *work, desk, timeout_seconds=self._seconds, name=f"hook {self._path}"
                )
            call.charge(num_groups)
            call.finish(report)
            log.info("rollout_function_returned", hook=self._path, rollout_id=rollout_id, metrics=report.metrics)
        except (WorkerError, HeadraceError) as error:
            call.charge(num_groups)
            call.fail(call_failure(error))
        finally:
            call.give_back("the call of the rollout function was ended")

    def _call_args(self, num_groups: int) -> HookArgs:
        """The job's options; the groups that the step still needs are the batch that the function is to return."""
        at_once = max(self._args.get("over_sampling_batch_size") or num_groups, num_groups)
        return HookArgs({**self._args, "rollout_batch_size": num_groups, "over_sampling_batch_size": at_once})

    async def _rollout_id(self) -> int:
        """The step that the ledger fills now; where it does not say, the version that is served."""
        try:
            return await self._next_step()
        except HeadraceError as error:
            log.warning("rollout_id_unknown", error=error.message)
            return self._weights.policy_version
