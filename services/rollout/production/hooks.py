"""Asks the user's functions: what makes samples, what keeps groups, what looks at all of them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from headrace.errors import ConfigError, HeadraceError, InvalidArgument, Unavailable
from headrace.hooks import HookArgs, from_hook, load_hook, run_generate, to_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.convert import require_finished
from headrace.hooks.failure import call_failure
from headrace.hooks.filter import (
    ALL_REWARDS_ARE,
    load_all_samples,
    load_filter,
    load_sample_hook,
    run_all_samples,
    run_filter,
    run_sample_hooks,
)
from headrace.hooks.generate import takes_group
from headrace.images import processed_of, raw_of
from headrace.job.schema.production import RolloutSection
from headrace.limits import MAX_COUNTER, MAX_ID_CHARACTERS, whole_number
from headrace.process.workers import WorkerError, WorkerPool
from headrace.prompts import label_for_hooks
from headrace.rpc.log import kept_running, log
from headrace.sample_log import ASKED
from headrace.trajectory import FILTERED, Failure, Sample, Status
from services.rollout.engine.fleet import Activity
from services.rollout.engine.weights import ServedWeights
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import Sampler, SampleRequest, failed_sample, span_of

GENERATE_FUNCTION_PATH = "generate_function_path"
"""The key in a prompt's hook_json of the function that plays it."""
_LOAD_SECONDS = 120.0
_FILTER_SECONDS = 30.0
T = TypeVar("T")


class UserFunction(Generic[T]):
    """A user's function in worker processes, because it may be slow. `load` is what a worker loads it with."""

    def __init__(
        self,
        path: str,
        load: Callable[[str], T],
        field: str,
        seconds: float,
        *,
        workers: int = 1,
        calls_at_once: int = 1,
        kind: str = "hook",
    ) -> None:
        """`field`: the job's, which names it. `seconds`: the limit of a call."""
        self._name = f"{kind} {path}"
        self._path = path
        self._load = load
        self._field = field
        self._seconds = seconds
        self.pool = WorkerPool(workers, calls_per_worker=-(-calls_at_once // workers))

    async def start(self) -> T:
        """Returns what `load` does. Raises ConfigError when it cannot be loaded or takes other arguments."""
        try:
            loaded: T = await self.pool.run(self._load, self._path, timeout_seconds=_LOAD_SECONDS, name=self._name)
        except WorkerError as error:
            raise ConfigError(error.message, field=f"rollout.{self._field}") from error
        return loaded

    async def call(self, run: Callable[..., Any], *args: Any) -> Any:
        """Returns what `run(path, *args)` does in a worker. Raises WorkerError."""
        return await self.pool.run(run, self._path, *args, timeout_seconds=self._seconds, name=self._name)

    async def close(self) -> None:
        await self.pool.close()


class GroupFilter(UserFunction[None]):
    """Asks the job's filter whether a group is kept."""

    def __init__(self, path: str, args: HookArgs, *, seconds: float = _FILTER_SECONDS) -> None:
        super().__init__(path, load_filter, "dynamic_sampling_filter_path", seconds)
        self._args = args

    @classmethod
    def of(cls, config: RolloutSection, args: HookArgs) -> GroupFilter | None:
        """Returns None when the job names no function."""
        path = config.dynamic_sampling_filter_path
        return cls(path, args) if path else None

    async def refusal(self, samples: Sequence[Sample]) -> Failure | None:
        """Returns why the group is dropped, or None when it is stored. Raises WorkerError when the function fails."""
        keep, reason = await self.call(run_filter, self._args, [to_hook(sample) for sample in samples])
        return None if keep else Failure(FILTERED, reason or self._own_reason(samples))

    def _own_reason(self, samples: Sequence[Sample]) -> str:
        """What is said of a group whose filter gave no reason."""
        rewards = {sample.reward for sample in samples if sample.reward is not None}
        return f"{ALL_REWARDS_ARE}{rewards.pop()}" if len(rewards) == 1 else f"{self._path} dropped it"


# Shows a user's function all samples of a step: of the groups that are put, and of those that the filter dropped.
# consumes: scored groups; waits for: a step's worth of kept ones, or many in all; produces: calls in a worker, one at a
# time. While one runs, groups gather for the next; the oldest are left out, with a warning, where it takes too long.

_ALL_SAMPLES_SECONDS = 300.0
_MOST_STEPS = 8
"""The number of steps whose groups may gather, kept and dropped ones."""


class AllSamples:
    """Calls the function at `path`; its failure is logged, and costs no sample."""

    def __init__(self, path: str, args: HookArgs, metrics: RolloutMetrics, *, groups_per_step: int) -> None:
        self._path = path
        self._args = args
        self._metrics = metrics
        self._groups_per_step = groups_per_step
        self._function = UserFunction(path, load_all_samples, "rollout_all_samples_process_path", _ALL_SAMPLES_SECONDS)
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
        await self._function.start()
        work = kept_running("show all samples", self._run, self._metrics.background_work_ended)
        self._calling = asyncio.create_task(work)

    async def close(self) -> None:
        """Ends a call that runs."""
        if self._calling:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)
        await self._function.close()

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
                await self._function.call(run_all_samples, self._args, groups)
            except WorkerError as error:
                log.warning("hook_failed", hook=self._path, groups=len(groups), message=error.message)


# Samples between the service and a user's function: as the function sees them, and as they are stored.
# What comes back is checked like any peer's message. A sample that cannot be used is a failure of its own.

_SHOWN_CHARACTERS = 300


class WeightsRefused(Unavailable):
    """The samples must not be stored; they are generated again."""


def sample_for_hook(request: SampleRequest, args: HookArgs) -> HookSample:
    """Gives the function a row's messages as they are, unless the job applies the chat template to prompts."""
    if request.begun:
        return to_hook(request.begun)
    prompt, metadata, fields = request.prompt, dict(request.metadata), request.hook_fields
    if prompt.tools:
        metadata.setdefault("tools", prompt.tools)
    columns = prompt.images.columns if prompt.images else {}
    as_text = prompt.messages is None or args.get("apply_chat_template")
    return HookSample(
        group_index=zlib.crc32(request.group_id.encode()),  # the same for all samples of a group, after a restart too
        index=request.index,
        session_id=fields.get("session_id", request.sample_id),
        prompt=prompt.text if as_text else [dict(message) for message in prompt.messages or ()],
        multimodal_inputs=raw_of(columns),
        multimodal_train_inputs=processed_of(columns),
        label=label_for_hooks(request.label, fields),
        metadata=metadata,
        generate_function_path=fields.get(GENERATE_FUNCTION_PATH),
        custom_rm_path=fields.get("custom_rm_path"),
    )


class SampleCodec:
    """Converts the samples of the function at `path`."""

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        warn: Callable[[str], None] = lambda _: None,
        encoder: PromptEncoder | None = None,
    ) -> None:
        """With an `encoder`, samples show the text that the model was asked where it is another than the prompt's."""
        self._encoder = encoder
        self._templates_twice = False
        self._path = path
        self._args = args
        self._weights = weights
        self._warn = warn
        self._warned = False

    def given(self, request: SampleRequest) -> HookSample:
        """The request's sample as the function is given it."""
        return sample_for_hook(request, self._args)

    async def of_one(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Returns the samples of one request; an unusable one is that request's failure."""
        try:
            return await self._from_hooks(request, made, oldest)
        except WeightsRefused:
            raise
        except Exception as error:  # noqa: BLE001  # what a user's function returned may be anything
            failure = failure_of(f"hook {self._path}", error)
        log.warning("hook_failed", hook=self._path, sample_id=request.sample_id, message=failure.message)
        return [failed_sample(request, failure)]

    async def _from_hooks(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Gives one sample the request's id; those of a fan-out are numbered and share it as their rollout."""
        if len(made) != 1:
            for sample in made:
                sample.rollout_id = request.sample_id
        for sample in made:
            require_finished(self._path, sample)
            self._warn_without_versions(sample)
            sample.weight_versions = [await self._version(name) for name in sample.weight_versions] or [str(oldest)]
        made_samples = [
            with_reward(
                from_hook(
                    sample,
                    sample_id=request.sample_id if len(made) == 1 else f"{request.sample_id}/{number}",
                    group_id=request.group_id,
                    index=request.index,
                    rendered_prompt=request.prompt.text,
                    sampling_params=request.params.for_engine(),
                ),
                sample,
                self._args,
                f"hook {self._path}",
            )
            for number, sample in enumerate(made)
        ]
        if self._encoder is None or request.prompt.images is not None:
            return made_samples
        return [await self._encoder.off_loop(self._with_asked, request, sample) for sample in made_samples]

    def _with_asked(self, request: SampleRequest, sample: Sample) -> Sample:
        """Notes the text of the prompt's tokens where the function has made another one."""
        assert self._encoder is not None
        if not sample.response_length:
            return sample
        asked = self._encoder.decode_exactly(sample.tokens[: sample.prompt_length].tolist())
        if asked == request.prompt.text:
            return sample
        if self._args.get("apply_chat_template") and self._is_templated_twice(request.prompt.text, asked):
            self._warn_of_two_templates(asked)
        return replace(sample, hook_fields={**sample.hook_fields, ASKED: asked})

    def _is_templated_twice(self, text: str, asked: str) -> bool:
        assert self._encoder is not None
        for shown in (text, text.strip()):  # some templates cut blanks off
            if shown and shown in asked:
                turn = self._encoder.render([{"role": "user", "content": shown}], None)
                if shown + turn.rpartition(shown)[2] in asked:
                    return True
        return False

    def _warn_of_two_templates(self, asked: str) -> None:
        if self._templates_twice:
            return
        self._templates_twice = True
        shown = asked if len(asked) <= _SHOWN_CHARACTERS else f"{asked[:_SHOWN_CHARACTERS]}…"
        self._warn(
            f"hook {self._path} makes messages of sample.prompt, which --apply-chat-template has rendered already: the "
            f"model is asked {shown!r}. Leave --apply-chat-template out, or pass sample.prompt to generate_single "
            "as it is"
        )

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

    async def _version(self, name: object) -> str:
        """Returns the policy version behind a name that an engine gave, or behind a version's own number."""
        if isinstance(name, str) and (number := whole_number(name, MAX_COUNTER)) is not None:
            if number > self._weights.policy_version:
                raise InvalidArgument(f"weight_versions hold {name}, {self._weights.policy_version} is served")
            return name
        version = await self._weights.version_of(name) if isinstance(name, str) else None
        if version is None:
            raise WeightsRefused(f"weight_versions hold {name!r:.80}, which is of refused weights")
        return str(version)


_FINISHED = (Status.COMPLETED, Status.TRUNCATED)


def with_reward(sample: Sample, made: HookSample, args: HookArgs, name: str) -> Sample:
    """Takes a reward that the function called `name` has set; no scorer is asked then."""
    if made.reward is None or sample.status not in _FINISHED:
        return sample
    parts = made.reward if isinstance(made.reward, dict) else {}
    return replace(sample, reward=made.get_reward_value(args), reward_parts=parts, scorer=name[-MAX_ID_CHARACTERS:])


def failure_of(name: str, error: Exception) -> Failure:
    """What is wrong with the samples of a call, or with what the function called `name` made of them."""
    if isinstance(error, WorkerError | HeadraceError):
        return call_failure(error)
    return Failure("HOOK_INVALID", f"what {name} returned cannot be used: {type(error).__name__}: {error}")


# Shows each generated sample to the user's functions before it is scored, and takes back what they made of it.
# A sample that a function fails on, or makes unusable, is a failure of its own. Samples that were aborted or have
# failed are not shown: the first will be continued, and the others hold no response.

_WORKERS = 2
_SAMPLE_HOOK_SECONDS = 60.0


class PreScoreHooks:
    """The functions at `paths`, in their order."""

    def __init__(self, paths: Sequence[str], args: HookArgs) -> None:
        self._paths = tuple(paths)
        self._args = args
        self._name = f"hook {', '.join(paths)}"
        self._pool = WorkerPool(_WORKERS)

    @classmethod
    def of(cls, config: RolloutSection, args: HookArgs) -> PreScoreHooks | None:
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
        if sample.status not in _FINISHED:
            return sample
        try:
            changed = await self._pool.run(
                run_sample_hooks,
                self._paths,
                self._args,
                to_hook(sample),
                evaluation,
                timeout_seconds=_SAMPLE_HOOK_SECONDS,
                name=self._name,
            )
            return self._taken_back(sample, changed)
        except Exception as error:  # noqa: BLE001  # what a user's function returned may be anything
            failure = failure_of(self._name, error)
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
        if changed.reward == to_hook(sample).reward:
            return replace(taken, reward=sample.reward, reward_parts=sample.reward_parts, scorer=sample.scorer)
        return with_reward(taken, changed, self._args, self._name)


class WithPreScoreHooks:
    """A sampler whose samples are those of another one, as the functions leave them."""

    def __init__(self, sampler: Sampler, hooks: PreScoreHooks) -> None:
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


# Samples from a user's generate function, in worker processes.
# The function asks the router itself, so its samples are held back here until no verdict on weights is pending; if
# weights were refused while it ran, all its samples are generated again.


class CustomGenerateSampler:
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
        self._samples = SampleCodec(path, args, weights, warn, encoder)
        self._function = UserFunction(
            path,
            hook_takes_group,
            "custom_generate_function_path",
            seconds,
            workers=_WORKERS,
            calls_at_once=calls_at_once,
        )
        self._per_sample = per_sample
        self._warn = warn
        self._weights = weights
        self._activity = activity or Activity(0)
        self._places = asyncio.Semaphore(calls_at_once)
        self._args = args
        self._takes_group = False
        self.in_flight = 0

    async def start(self) -> None:
        """Raises ConfigError when the function cannot be loaded or takes other arguments."""
        self._takes_group = await self._function.start() and not self._per_sample
        if self._takes_group:
            self._warn(
                f"hook {self._path} is called with all samples of a group: if it generates one after another, add "
                "--generate-per-sample, which calls it once for each sample, all at the same time"
            )

    async def close(self) -> None:
        await self._function.close()

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
        given, params = [self._samples.given(request) for request in requests], requests[0].params.for_engine()
        try:
            async with self._places:
                oldest, refusals = self._weights.policy_version, self._weights.refusals
                with self._activity.requests(len(requests)), span_of(requests, evaluation=evaluation):
                    results = await self._function.call(run_generate, self._args, given, params, evaluation)
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

    The functions at `paths`, which the job names, are loaded at the start. With `any_path` others are loaded when their
    first prompt comes: a data source names them. All other prompts go to the job's own sampler.
    """

    def __init__(
        self,
        sampler: Sampler,
        make: Callable[[str], CustomGenerateSampler],
        paths: Sequence[str] = (),
        *,
        any_path: bool = False,
    ) -> None:
        self._sampler = sampler
        self._make = make
        self._paths = paths
        self._any_path = any_path
        self._of_paths: dict[str, asyncio.Task[CustomGenerateSampler]] = {}

    @property
    def in_flight(self) -> int:
        loaded = [task.result() for task in self._of_paths.values() if task.done() and not task.exception()]
        return self._sampler.in_flight + sum(each.in_flight for each in loaded)

    async def start(self) -> None:
        """Raises ConfigError when a function cannot be loaded or takes other arguments."""
        await asyncio.gather(*map(self._function, self._paths))

    async def close(self) -> None:
        for task in self._of_paths.values():
            task.cancel()
        loaded = await asyncio.gather(*self._of_paths.values(), return_exceptions=True)
        for each in loaded:
            if isinstance(each, CustomGenerateSampler):
                await each.close()

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns the samples of one prompt. A function that cannot be loaded fails them."""
        path = requests[0].hook_fields.get(GENERATE_FUNCTION_PATH)
        sampler: Sampler = self._sampler
        if isinstance(path, str) and path and (self._any_path or path in self._paths):
            try:
                sampler = await self._function(path)
            except HeadraceError as error:
                return [failed_sample(request, Failure("HOOK_NOT_LOADED", error.message)) for request in requests]
        return await sampler.sample_all(requests, evaluation=evaluation, return_partial=return_partial)

    async def _function(self, path: str) -> CustomGenerateSampler:
        if path not in self._of_paths:
            self._of_paths[path] = asyncio.create_task(self._loaded(path))
        return await asyncio.shield(self._of_paths[path])

    async def _loaded(self, path: str) -> CustomGenerateSampler:
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
