"""Samples from a user's generate function, in worker processes.

The function asks the router itself, so its samples are held back here until no verdict on weights is pending; if
weights were refused while it ran, all its samples are generated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError
from headrace.hooks import HookArgs, load_hook, run_generate
from headrace.hooks.failure import call_failure
from headrace.hooks.generate import takes_group
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample
from services.rollout.engine.activity import Activity
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks.hook_samples import HookSamples, WeightsRefused
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import Sampler, SampleRequest, failed_sample

_WORKERS = 2
_LOAD_SECONDS = 120.0


class HookSampler:
    """Calls the function with slime's arguments; an exception is its samples' failure.

    At most `calls_at_once` calls run: the function is called once for each sample, all of them at the same time, unless
    it takes a list of samples and the job does not say `per_sample`.
    """

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        *,
        seconds: float,
        calls_at_once: int,
        per_sample: bool = False,
        activity: Activity | None = None,
        warn: Callable[[str], None] = lambda _: None,
        encoder: PromptEncoder | None = None,
    ) -> None:
        self._path = path
        self._samples = HookSamples(path, args, weights, warn, encoder)
        self._per_sample = per_sample
        self._warn = warn
        self._weights = weights
        self._activity = activity or Activity(0)
        self._places = asyncio.Semaphore(calls_at_once)
        self._args = args
        self._seconds = seconds
        self._pool = WorkerPool(_WORKERS, calls_per_worker=-(-calls_at_once // _WORKERS))
        self._takes_group = False
        self.in_flight = 0

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        try:
            takes_list = await self._pool.run(hook_takes_group, self._path, timeout_seconds=_LOAD_SECONDS)
        except WorkerError as error:
            raise ConfigError(error.message, field="rollout.custom_generate_function_path") from error
        self._takes_group = takes_list and not self._per_sample
        if self._takes_group:
            self._warn(
                f"hook {self._path} is called with all samples of a group: if it generates one after another, add "
                "--generate-per-sample, which calls it once for each sample, all at the same time"
            )

    async def close(self) -> None:
        await self._pool.close()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns at least one sample for each request; more where one execution fans out. ABORTED ones are released.

        Raises Unavailable when weights were refused meanwhile: none of the samples may be stored.
        """
        parts = [requests] if self._takes_group else [[request] for request in requests]
        self.in_flight += len(requests)
        try:
            made = await asyncio.gather(*(self._call(part, evaluation=evaluation) for part in parts))
        finally:
            self.in_flight -= len(requests)
        return [sample for samples in made for sample in samples]

    async def _call(self, requests: Sequence[SampleRequest], *, evaluation: bool) -> list[Sample]:
        params = requests[0].params.for_engine()
        work = (self._path, self._args, [self._samples.given(r) for r in requests], params, evaluation)
        try:
            async with self._places:
                oldest, refusals = self._weights.policy_version, self._weights.refusals
                with self._activity.requests(len(requests)):
                    results = await self._pool.run(
                        run_generate, *work, timeout_seconds=self._seconds, name=f"hook {self._path}"
                    )
            await self._weights.wait_for_verdicts()
            self._require_no_refusal(refusals)
            oldest = min(oldest, self._weights.policy_version)
            made = [await self._samples.of_one(*pair, oldest) for pair in zip(requests, results, strict=True)]
            return [sample for samples in made for sample in samples]
        except WeightsRefused:
            raise
        except (WorkerError, HeadraceError) as error:
            log.warning("hook_failed", hook=self._path, sample_id=requests[0].sample_id, message=error.message)
            return [failed_sample(request, call_failure(error)) for request in requests]

    def _require_no_refusal(self, refusals: int) -> None:
        if self._weights.refusals != refusals:
            raise WeightsRefused(f"weights were refused while hook {self._path} ran: it runs again")


class OwnFunctions:
    """A sampler whose prompts may name the generate function that plays them (`generate_function_path`).

    A function is loaded when its first prompt comes; all other prompts go to the job's own sampler.
    """

    def __init__(self, sampler: Sampler, make: Callable[[str], HookSampler]) -> None:
        self._sampler = sampler
        self._make = make
        self._of_paths: dict[str, asyncio.Task[HookSampler]] = {}

    @property
    def in_flight(self) -> int:
        loaded = [task.result() for task in self._of_paths.values() if task.done() and not task.exception()]
        return self._sampler.in_flight + sum(each.in_flight for each in loaded)

    async def start(self) -> None:
        """Functions are loaded when they are needed."""

    async def close(self) -> None:
        for task in self._of_paths.values():
            task.cancel()
        loaded = await asyncio.gather(*self._of_paths.values(), return_exceptions=True)
        for each in loaded:
            if isinstance(each, HookSampler):
                await each.close()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns the samples of one prompt. A function that cannot be loaded fails them."""
        path = requests[0].hook_fields.get("generate_function_path")
        sampler: Sampler = self._sampler
        if isinstance(path, str) and path:
            if path not in self._of_paths:
                self._of_paths[path] = asyncio.create_task(self._loaded(path))
            try:
                sampler = await asyncio.shield(self._of_paths[path])
            except HeadraceError as error:
                return [failed_sample(request, Failure("HOOK_NOT_LOADED", error.message)) for request in requests]
        return await sampler.sample_all(requests, evaluation=evaluation, return_partial=return_partial)

    async def _loaded(self, path: str) -> HookSampler:
        sampler = self._make(path)
        await sampler.start()
        return sampler


def custom_args(args: HookArgs, router_url: str) -> HookArgs:
    """Returns the job's options, and the router's address under slime's names."""
    router = urlsplit(router_url)
    return HookArgs({**args, "sglang_router_ip": router.hostname, "sglang_router_port": router.port})


def hook_takes_group(path: str) -> bool:
    """True when the function takes a list of samples. Runs in a worker. Raises ConfigError for another signature."""
    return takes_group(load_hook(path))
