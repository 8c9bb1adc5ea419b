"""The scorers that are set while the service runs: who pays for an item, and a shadow that nothing trains on.

Consumes: changes, one at a time. Waits for: the new scorer's workers, and the state on disk. Produces: a payer for each
group. A change is on disk before it takes effect. The workers of a scorer that pays no more end after its last call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.errors import ConfigError, FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.hooks import prepare_reward
from headrace.hooks.kit.sandbox import require_sandbox
from headrace.hooks.reward import RewardForm, RewardHook, reward_hook_by_name
from headrace.job.schema.services import RewardSection
from headrace.limits import MAX_SCORE_ITEMS, require_id, require_path
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from headrace.shadow_log import Comparison, ShadowLog, is_equal
from services.reward.registry import (
    BOXED,
    CUSTOM,
    REMOTE,
    Builtin,
    Registry,
    Scorer,
    prepare_builtin,
    remote_scorer,
    users_scorer,
)
from services.reward.swap import NamedScorer, Swap, SwapFile, Trial, checked_share

Choice = tuple[ScoreItem, Scorer] | ScoreError
"""An item with its scorer, or the error that it has none."""
ScoreWith = Callable[[Scorer, Sequence[ScoreItem]], Awaitable[list[ScoreResult]]]

LOAD_SECONDS = 120.0
_ASK_SECONDS = 10.0
# An async function mostly waits (for a judge model, for a sandbox), so several of its calls share a worker.
_ASYNC_CALLS_PER_WORKER = 32
_MOST_SHADOWED = 2_048
"""Samples that wait for the shadow; while there are as many, further ones are dropped."""


@dataclass
class ShadowCounts:
    """Samples that the shadow was given since the service started."""

    compared: int = 0
    equal: int = 0
    failed: int = 0
    dropped: int = 0


class LiveScorers:
    """`load` comes first."""

    def __init__(self, registry: Registry, reward: RewardSection, file: SwapFile, shadow_log: ShadowLog | None) -> None:
        self._registry = registry
        self._reward = reward
        self._file = file
        self._log = shadow_log
        self._changing = asyncio.Lock()
        self._live: Scorer | None = None
        """None: the job's own."""
        self._candidate: Scorer | None = None
        self._calls: set[asyncio.Future[None]] = set()
        self._tasks: dict[asyncio.Task[None], Scorer | None] = {}
        """Work beside the calls, with the scorer that a comparison needs."""
        self._shadowed = 0
        self.counts = ShadowCounts()
        self.swap: Swap

    async def load(self) -> None:
        """Continues with the state on disk. Raises ConfigError when its scorer that pays cannot be loaded."""
        swap = self._file.read(_said_of(self._reward))
        async with AsyncExitStack() as on_failure:
            try:
                live, version = await self._loaded(swap.live.name, on_failure, asks=False)
            except HeadraceError as error:
                raise ConfigError(
                    f"{swap.live.name} pays by {self._file.path} and cannot be loaded: {error.message}: mend it, or "
                    "delete that file, and the job's own scorer pays"
                ) from error
            swap = _with_live(swap, version)
            candidate = None
            if trial := swap.trial:
                try:
                    candidate, version = await self._loaded(trial.scorer.name, on_failure, asks=False)
                    swap = swap.tried(replace(trial, scorer=NamedScorer(trial.scorer.name, version)))
                except HeadraceError as error:
                    log.error("candidate_not_loaded", candidate=trial.scorer.name, error=error.message)
                    swap = swap.stopped()
            on_failure.pop_all()
        self.swap, self._live, self._candidate = swap, live, candidate

    async def change(self, request: pb.ChangeScorerRequest) -> Swap:
        """Makes one change, or none where it was made already. Raises what reward.proto says, and changes nothing."""
        change_id = require_id(request.change_id, "change_id")
        async with self._changing:
            if change_id in self.swap.change_ids:
                return self.swap
            async with AsyncExitStack() as on_failure:
                try:
                    swap, live, candidate = await self._changed(request, on_failure)
                except ConfigError as error:
                    raise InvalidArgument(error.message, field="scorer") from error
                swap = swap.numbered(change_id)
                # From here on a kill leaves the new state, and the caller that asks again gets it.
                await asyncio.to_thread(self._file.write, swap)
                on_failure.pop_all()
            former = {id(each): each for each in (self._live, self._candidate) if each}
            self.swap, self._live, self._candidate = swap, live, candidate
            for kept in (live, candidate):
                former.pop(id(kept), None)
            self._start(self._retire(list(former.values())))
        log.info("scorer_changed", action=request.WhichOneof("action"), live=swap.live, trial=swap.trial)
        return swap

    async def _changed(
        self, request: pb.ChangeScorerRequest, on_failure: AsyncExitStack
    ) -> tuple[Swap, Scorer | None, Scorer | None]:
        swap = self.swap
        match request.WhichOneof("action"):
            case "set":
                live, version = await self._loaded(_named(request.set), on_failure)
                return swap.set(NamedScorer(request.set, version)), live, None
            case "shadow":
                return await self._tried(request.shadow, on_failure, pays=False)
            case "canary":
                return await self._tried(request.canary, on_failure, pays=True)
            case "promote":
                return swap.promoted(), self._candidate, None
            case "rollback":
                name = swap.before.name
                live, version = await self._loaded(name, on_failure)
                return swap.rolled_back(NamedScorer(name, version)), live, None
            case "stop":
                return swap.stopped(), self._live, None
        raise InvalidArgument("no action is named: set, shadow, canary, promote, rollback or stop", field="action")

    async def _tried(
        self, trial: pb.Trial, on_failure: AsyncExitStack, *, pays: bool
    ) -> tuple[Swap, Scorer | None, Scorer | None]:
        share = checked_share(trial.share)
        if trial.scorer:
            candidate, version = await self._loaded(_named(trial.scorer), on_failure)
            named = NamedScorer(trial.scorer, version)
        else:
            named, candidate = self.swap.candidate, self._candidate
        return self.swap.tried(Trial(named, share, pays)), self._live, candidate

    async def _loaded(self, name: str, on_failure: AsyncExitStack, *, asks: bool = True) -> tuple[Scorer | None, str]:
        """The scorer of this name with workers of its own, and its version. None for the job's own.

        `asks` another service whether it has the scorer. Raises InvalidArgument, or Unavailable for a service that
        does not answer.
        """
        if not name:
            return None, self._version_of_job()
        scorer = await self._made(name)
        on_failure.push_async_callback(scorer.close)
        if scorer.workers:
            try:
                await scorer.workers.start()
            except WorkerError as error:
                raise InvalidArgument(error.message, field="scorer") from error
        elif scorer.remote and asks:
            known = await scorer.remote.client.list_scorers(deadline_seconds=_ASK_SECONDS)
            if scorer.remote.scorer and scorer.remote.scorer not in {each.name for each in known}:
                raise InvalidArgument(
                    f"{name}: the service there has no scorer {scorer.remote.scorer}: there are "
                    f"{', '.join(each.name for each in known)}",
                    field="scorer",
                )
        return scorer, scorer.version

    async def _made(self, name: str) -> Scorer:
        if name.startswith(REMOTE):
            return remote_scorer(name)
        try:
            found = self._registry.require(name)
        except NotFound as error:
            if "." not in name:
                raise InvalidArgument(error.message, field="scorer") from error
        else:
            await require_settings(self._reward, found.name)
            if found.name == CUSTOM:
                raise InvalidArgument(f"{CUSTOM} is the job's own function: `headrace reward rollback` goes back to it")
            return replace(found, workers=workers_for(self._reward, builtin=found.builtin))
        hook = await described(name)
        if hook.form is RewardForm.BATCH and self._reward.reward_model_path is None:
            raise InvalidArgument(
                f"{name} is a class made with a model's folder: set --reward-model-path", field="scorer"
            )
        return replace(users_scorer(CUSTOM, hook), workers=workers_for(self._reward, hook=hook))

    def _version_of_job(self) -> str:
        default = self._registry.default
        return "" if default is None else self._registry.require(default).version

    @contextmanager
    def call(self) -> Iterator[None]:
        """Keeps the scorers that pay at its start until its end."""
        done = asyncio.get_running_loop().create_future()
        self._calls.add(done)
        try:
            yield
        finally:
            self._calls.discard(done)
            done.set_result(None)

    async def _retire(self, scorers: Sequence[Scorer]) -> None:
        for task in [task for task, needed in self._tasks.items() if any(needed is each for each in scorers)]:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls))
        for scorer in scorers:
            await scorer.close()

    def payer_of(self, group_id: str, *, evaluation: bool) -> Scorer | None:
        """None: the job's own scorer."""
        trial = self.swap.trial
        if trial and trial.pays and not evaluation and trial.takes(group_id):
            return self._candidate
        return self._live

    def shadow(
        self,
        items: Sequence[ScoreItem | ScoreError],
        choices: Sequence[Choice],
        results: Sequence[ScoreResult],
        score_with: ScoreWith,
    ) -> None:
        """Has the candidate's share of what was scored scored again. Returns at once; its failures are counted."""
        trial, candidate = self.swap.trial, self._candidate
        if trial is None or trial.pays or candidate is None:
            return
        pairs = [
            (item, result)
            for item, choice, result in zip(items, choices, results, strict=True)
            if isinstance(item, ScoreItem) and isinstance(result, Score) and trial.takes(item.group_id)
        ]
        if not pairs:
            return
        if self._shadowed + len(pairs) > _MOST_SHADOWED:
            self.counts.dropped += len(pairs)
            return
        self._shadowed += len(pairs)
        self._start(self._compare(candidate, pairs, score_with), candidate)

    async def _compare(
        self, candidate: Scorer, pairs: Sequence[tuple[ScoreItem, Score]], score_with: ScoreWith
    ) -> None:
        try:
            others = await score_with(candidate, [item for item, _ in pairs])
            compared = [
                _comparison(item, paid, other)
                for (item, paid), other in zip(pairs, others, strict=True)
                if isinstance(other, Score)
            ]
            self.counts.failed += len(pairs) - len(compared)
            if self._log and compared:
                await asyncio.to_thread(self._log.append, compared)
            self.counts.compared += len(compared)
            self.counts.equal += sum(is_equal(each.live_reward, each.shadow_reward) for each in compared)
        except OSError as error:
            log.warning("comparison_not_written", samples=len(pairs), error=str(error))
        finally:
            self._shadowed -= len(pairs)

    def _start(self, work: Coroutine[Any, Any, None], needed: Scorer | None = None) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = needed
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            log.error("work_beside_scoring_ended", exc_info=error)

    async def close(self) -> None:
        """Ends the shadow's work and all workers."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for scorer in (self._live, self._candidate):
            if scorer:
                await scorer.close()


def _named(name: str) -> str:
    return require_path(name, "scorer")


async def require_settings(reward: RewardSection, name: str) -> None:
    """Raises ConfigError for a scorer of headrace's that lacks its server, or a sandbox."""
    match name.removeprefix(BOXED):
        case "remote_rm" if reward.rm_url is None:
            raise ConfigError("rm_type remote_rm asks a server: set --rm-url to it", field="rm_url")
        case "judge" if reward.judge_url is None:
            raise ConfigError("rm_type judge asks a model: set --judge-url and --judge-model", field="judge_url")
        case "code" if reward.custom_rm_path is None:
            try:
                await asyncio.to_thread(require_sandbox, "rm_type code")
            except FailedPrecondition as error:
                raise ConfigError(error.message, field="insecure_sandbox") from error


def _with_live(swap: Swap, version: str) -> Swap:
    if swap.live.version and version != swap.live.version:
        log.warning("scorer_has_changed", scorer=swap.live.name, before=swap.live.version, now=version)
    return replace(swap, live=NamedScorer(swap.live.name, version))


def _said_of(reward: RewardSection) -> str:
    return reward.custom_rm_path or reward.rm_type or ""


def _comparison(item: ScoreItem, paid: Score, other: Score) -> Comparison:
    return Comparison(
        sample_id=item.item_id,
        group_id=item.group_id,
        response_tokens=item.response_tokens,
        live=paid.scorer,
        live_version=paid.scorer_version,
        live_reward=paid.value,
        shadow=other.scorer,
        shadow_version=other.scorer_version,
        shadow_reward=other.value,
    )


async def described(path: str) -> RewardHook:
    """A user's function as a new worker finds it. Raises InvalidArgument for a wrong one."""
    pool = WorkerPool(1)
    try:
        hook: RewardHook = await pool.run(reward_hook_by_name, path, timeout_seconds=LOAD_SECONDS, name=f"hook {path}")
        return hook
    except WorkerError as error:
        raise InvalidArgument(error.message, field="scorer") from error
    finally:
        await pool.close()


def workers_for(reward: RewardSection, *, hook: RewardHook | None = None, builtin: Builtin | None = None) -> WorkerPool:
    """Workers that have imported a function, or a scorer of headrace's."""
    if hook:
        model_path = str(reward.reward_model_path) if reward.reward_model_path else None
        prepare: Callable[[], None] = partial(prepare_reward, hook.path, hook.form, model_path)
    else:
        prepare = partial(prepare_builtin, builtin.name if builtin else None)
    waits = (hook and hook.is_async) or (builtin and builtin.remote)
    return WorkerPool(
        reward.reward_workers,
        calls_per_worker=_ASYNC_CALLS_PER_WORKER if waits else 1,
        max_waiting=MAX_SCORE_ITEMS,
        prepare=prepare,
        prepare_seconds=LOAD_SECONDS,
    )
