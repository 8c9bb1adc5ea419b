"""Samples from a user's generate function, in worker processes.

The function asks the router itself, so its samples are held back here until no verdict on weights is pending; if
weights were refused while it ran, all its samples are generated again.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError, InvalidArgument, Unavailable
from headrace.hooks import HookArgs, from_hook, load_hook, run_generate, to_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.finished import require_finished
from headrace.hooks.generate import takes_group
from headrace.images.columns import processed_of, raw_of
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.trajectory import Failure, Sample, Status
from headrace.wire.limits import MAX_ID_CHARACTERS
from services.rollout.engine.activity import Activity
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.sampling import SampleRequest, failed_sample

_WORKERS = 2
_LOAD_SECONDS = 120.0
_MOST_DIGITS = 16  # of 2^53


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
    ) -> None:
        self._path = path
        self._per_sample = per_sample
        self._warn = warn
        self._warned = False
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
        work = (self._path, self._args, [self._to_hook(r) for r in requests], params, evaluation)
        try:
            async with self._places:
                oldest, refusals = self._weights.policy_version, self._weights.refusals
                with self._activity.requests(len(requests)):
                    results = await self._pool.run(
                        run_generate, *work, timeout_seconds=self._seconds, name=f"hook {self._path}"
                    )
            await self._weights.settled()
            self._require_no_refusal(refusals)
            oldest = min(oldest, self._weights.policy_version)
            made = [await self._of_one(*pair, oldest) for pair in zip(requests, results, strict=True)]
            return [sample for samples in made for sample in samples]
        except WeightsRefused:
            raise
        except (WorkerError, HeadraceError) as error:
            log.warning("hook_failed", hook=self._path, sample_id=requests[0].sample_id, message=error.message)
            reason = error.reason if isinstance(error, HeadraceError) else _REASONS[type(error).__name__]
            return [failed_sample(request, Failure(reason, error.message)) for request in requests]

    def _to_hook(self, request: SampleRequest) -> HookSample:
        """Gives the function a row's messages as they are, unless the job applies the chat template to prompts."""
        if request.begun:
            return to_hook(request.begun)
        prompt, metadata = request.prompt, dict(request.metadata)
        if prompt.tools:
            metadata.setdefault("tools", prompt.tools)
        columns = prompt.images.columns if prompt.images else {}
        as_text = prompt.messages is None or self._args.get("apply_chat_template")
        return HookSample(
            group_index=zlib.crc32(
                request.group_id.encode()
            ),  # the same for all samples of a group, after a restart too
            index=request.index,
            session_id=request.sample_id,
            prompt=prompt.text if as_text else [dict(message) for message in prompt.messages or ()],
            multimodal_inputs=raw_of(columns),
            multimodal_train_inputs=processed_of(columns),
            label=request.label,
            metadata=metadata,
        )

    async def _of_one(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Returns the samples of one request; an unusable one is that request's failure."""
        try:
            return await self._from_hooks(request, made, oldest)
        except WeightsRefused:
            raise
        except HeadraceError as error:
            failure = Failure(error.reason, error.message)
        except Exception as error:  # noqa: BLE001  # what a user's function returned may be anything
            message = f"what hook {self._path} returned cannot be used: {type(error).__name__}: {error}"
            failure = Failure("HOOK_INVALID", message)
        log.warning("hook_failed", hook=self._path, sample_id=request.sample_id, message=failure.message)
        return [failed_sample(request, failure)]

    def _require_no_refusal(self, refusals: int) -> None:
        if self._weights.refusals != refusals:
            raise WeightsRefused(f"weights were refused while hook {self._path} ran: it runs again")

    async def _from_hooks(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Gives one sample the request's id; those of a fan-out are numbered and share it as their rollout."""
        if len(made) != 1:
            for sample in made:
                sample.rollout_id = request.sample_id
        for sample in made:
            require_finished(self._path, sample)
            self._warn_without_versions(sample)
            sample.weight_versions = [await self._version(name) for name in sample.weight_versions] or [str(oldest)]
        return [
            self._with_reward(
                from_hook(
                    sample,
                    sample_id=request.sample_id if len(made) == 1 else f"{request.sample_id}/{number}",
                    group_id=request.group_id,
                    index=request.index,
                    rendered_prompt=request.prompt.text,
                    sampling_params=request.params.for_engine(),
                ),
                sample,
            )
            for number, sample in enumerate(made)
        ]

    def _warn_without_versions(self, sample: HookSample) -> None:
        """Warns once about a function whose samples do not name their weights."""
        if self._warned or sample.weight_versions or not sample.response_length:
            return
        self._warned = True
        self._warn(
            f"hook {self._path} leaves weight_versions empty, so which weights made a sample is not known: the version "
            "that was served when the function was called counts for all of it, and staleness is at most what is "
            "shown. To have it measured, append each answer's meta_info['weight_version'] to sample.weight_versions"
        )

    def _with_reward(self, sample: Sample, made: HookSample) -> Sample:
        """Takes a reward that the function has set; no scorer is asked then."""
        if made.reward is None or sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            return sample
        parts = made.reward if isinstance(made.reward, dict) else {}
        scorer = f"hook {self._path}"[-MAX_ID_CHARACTERS:]
        return replace(sample, reward=made.get_reward_value(self._args), reward_parts=parts, scorer=scorer)

    async def _version(self, name: object) -> str:
        """Returns the policy version behind a name that an engine gave, or behind a version's own number."""
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS:
            if int(name) > self._weights.policy_version:
                raise InvalidArgument(f"weight_versions hold {name}, {self._weights.policy_version} is served")
            return name
        version = await self._weights.version_of(name) if isinstance(name, str) else None
        if version is None:
            raise WeightsRefused(f"weight_versions hold {name!r:.80}, which is of refused weights")
        return str(version)


class WeightsRefused(Unavailable):
    """The samples must not be stored; they are generated again."""


_REASONS = {
    "WorkerTimeout": "HOOK_TIMEOUT",
    "WorkerCrashed": "HOOK_CRASHED",
    "WorkerBroken": "HOOK_CRASHED",
    "WorkerRaised": "HOOK_RAISED",
}


def custom_args(args: HookArgs, router_url: str) -> HookArgs:
    """Returns the job's options, and the router's address under slime's names."""
    router = urlsplit(router_url)
    return HookArgs({**args, "sglang_router_ip": router.hostname, "sglang_router_port": router.port})


def hook_takes_group(path: str) -> bool:
    """True when the function takes a list of samples. Runs in a worker. Raises ConfigError for another signature."""
    return takes_group(load_hook(path))
