"""The scorers that are set while the service runs: who pays for an item, and a shadow that nothing trains on.

Consumes: changes, one at a time. Waits for: the new scorer's workers, and the state on disk. Produces: a payer for each
group. A change is on disk before it takes effect. The workers of a scorer that pays no more end after its last call.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.errors import ConfigError, FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.hooks.kit.sandbox import require_sandbox
from headrace.hooks.reward import RewardForm, RewardHook, reward_hook_by_name
from headrace.job.schema.section import Section
from headrace.job.schema.services import Clip, RewardPart, RewardSection
from headrace.limits import MAX_SCORE_ITEMS, require_id, require_path
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.score import Score, ScoreError, ScoreItem, ScoreResult
from headrace.shadow_log import Comparison, ShadowLog, is_equal
from services.reward.composition import Combine, Part, digest_of
from services.reward.registry import (
    BOXED,
    BUILTINS,
    COMPOSED,
    CUSTOM,
    REMOTE,
    Composition,
    Registry,
    Remote,
    ScoredPart,
    Scorer,
    prepare,
    remote_scorer,
    users_scorer,
)
from services.reward.swap import NamedScorer, Swap, SwapFile, Trial, checked_share

ScoreWith = Callable[[Scorer, Sequence[ScoreItem]], Awaitable[list[ScoreResult]]]

LOAD_SECONDS = 120.0
_ASK_SECONDS = 10.0
# An async function mostly waits (for a judge model, for a sandbox), so several of its calls share a worker.
_ASYNC_CALLS_PER_WORKER = 32
_MOST_SHADOWED = 2_048
"""Samples that wait for the shadow; while there are as many, further ones are dropped."""


@dataclass
class ShadowCounts:
    """Samples that the shadow was given since it is tried, or since the service started."""

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
        self._changes: set[asyncio.Task[Swap]] = set()
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
        """Makes one change, or none where it was made already. Raises what reward.proto says, and changes nothing.

        A caller that leaves meanwhile does not stop it: what is on disk is in effect, too.
        """
        task = asyncio.create_task(self._change(request, require_id(request.change_id, "change_id")))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change(self, request: pb.ChangeScorerRequest, change_id: str) -> Swap:
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
                try:
                    await asyncio.to_thread(self._file.write, swap)
                except OSError as error:
                    raise Unavailable(f"the change cannot be kept: {error}: free space, or mend the folder") from error
                on_failure.pop_all()
            if candidate is not self._candidate:
                self.counts = ShadowCounts()
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
        scorer = await scorer_named(self._registry, self._reward, name)
        if scorer.remote is None:
            scorer = scorer.with_workers(workers_for(self._reward, scorer))
        on_failure.push_async_callback(scorer.close)
        if scorer.workers:
            try:
                await scorer.workers.start()
            except WorkerError as error:
                raise InvalidArgument(error.message, field="scorer") from error
        for each in scorer.all() if asks else ():
            if each.remote:
                await _require_scorer(each.remote)
        return scorer, scorer.version

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
        try:
            if self._calls:
                await asyncio.wait(set(self._calls))
        finally:
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
        results: Sequence[ScoreResult],
        score_with: ScoreWith,
    ) -> None:
        """Has the candidate's share of what was scored scored again. Returns at once; its failures are counted."""
        trial, candidate = self.swap.trial, self._candidate
        if trial is None or trial.pays or candidate is None:
            return
        pairs = [
            (item, result)
            for item, result in zip(items, results, strict=True)
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
                comparison(item, paid, other)
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


async def _require_scorer(remote: Remote) -> None:
    """Raises Unavailable for a service that does not answer, InvalidArgument for one without the scorer."""
    known = [each.name for each in await remote.client.list_scorers(deadline_seconds=_ASK_SECONDS)]
    if remote.scorer and remote.scorer not in known:
        there = ", ".join(known)
        raise InvalidArgument(f"{remote.url}: there is no such scorer: there are {there}", field="scorer")


def _named(name: str) -> str:
    return require_path(name, "scorer")


async def require_settings(reward: RewardSection, name: str) -> None:
    """Raises ConfigError for a scorer of headrace's that lacks its server, or a sandbox."""
    match name.removeprefix(BOXED):
        case "remote_rm" | "nemo_gym" as asking if reward.rm_url is None:
            raise ConfigError(f"rm_type {asking} asks a server: set --rm-url to it", field="rm_url")
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
    """What the job says of its scorer."""
    if reward.reward_parts:
        return f"{COMPOSED} {digest_of(_rules_of(reward))}"
    return reward.custom_rm_path or reward.rm_type or ""


def comparison(item: ScoreItem, paid: Score, other: Score) -> Comparison:
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


def builtins_of(scorer: Scorer) -> list[str]:
    """The scorers of headrace's that it needs."""
    return [each.builtin.name for each in scorer.all() if each.builtin]


def workers_for(reward: RewardSection, scorer: Scorer | None) -> WorkerPool:
    """Workers that have imported what the scorer needs."""
    needed = list(scorer.all()) if scorer else []
    hooks = [each.hook for each in needed if each.hook]
    model_path = str(reward.reward_model_path) if reward.reward_model_path else None
    waits = any(hook.is_async for hook in hooks) or any(each.builtin and each.builtin.remote for each in needed)
    return WorkerPool(
        reward.reward_workers,
        calls_per_worker=_ASYNC_CALLS_PER_WORKER if waits else 1,
        max_waiting=MAX_SCORE_ITEMS,
        prepare=partial(
            prepare, builtins_of(scorer) if scorer else (), [(hook.path, hook.form) for hook in hooks], model_path
        ),
        prepare_seconds=LOAD_SECONDS,
    )


async def scorer_named(registry: Registry, reward: RewardSection, name: str) -> Scorer:
    """A scorer without workers of its own. Raises InvalidArgument for one that cannot be loaded."""
    if name.startswith(REMOTE):
        return remote_scorer(name)
    if name.endswith(".toml"):
        return await composed(registry, reward, parts_in(Path(name)), beside=Path(name).parent)
    try:
        found = registry.require(name)
    except NotFound as error:
        if "." not in name:
            raise InvalidArgument(error.message, field="scorer") from error
    else:
        if found.builtin is None:
            raise InvalidArgument(f"{name} is the job's own scorer: `headrace reward rollback` goes back to it")
        await require_settings(reward, name)
        return found
    hook = await described(name)
    if hook.form is RewardForm.BATCH and reward.reward_model_path is None:
        raise InvalidArgument(f"{name} is a class made with a model's folder: set --reward-model-path", field="scorer")
    return users_scorer(CUSTOM, hook, settings_of(reward).get(CUSTOM, ""))


def settings_of(reward: RewardSection) -> dict[str, str]:
    """Digests of the options that a scorer's results depend on, by its name."""
    prompt = reward.judge_prompt
    key = {"reward_key": reward.reward_key} if reward.reward_key else {}
    model = {"reward_model_path": str(reward.reward_model_path)} if reward.reward_model_path else {}
    judge = {
        "judge_url": reward.judge_url,
        "judge_model": reward.judge_model,
        "judge_prompt": prompt.read_text(encoding="utf-8") if prompt and prompt.is_file() else None,
        "judge_scale": reward.judge_scale,
        "judge_json": reward.judge_json,
    }
    server = {"rm_url": reward.rm_url} | key if reward.rm_url else {}
    found = {
        **{each.name: key for each in BUILTINS if each.part},
        "judge": judge if reward.judge_url else {},
        "remote_rm": server,
        "nemo_gym": server,
        CUSTOM: key | model,
    }
    return {name: digest_of(settings) for name, settings in found.items() if settings}


class PartsFile(Section):
    """What a file of a composed reward has: keys of a job's [reward]."""

    reward_parts: tuple[RewardPart, ...] = Field(min_length=1)
    reward_combine: Combine = "sum"
    reward_clip: Clip | None = None


def parts_in(file: Path) -> PartsFile:
    """Of a job file its section [reward] is read. Raises InvalidArgument."""
    try:
        text = tomllib.loads(file.read_text(encoding="utf-8"))
        section = text.get("reward", text)
        return PartsFile.model_validate({name: section[name] for name in PartsFile.model_fields if name in section})
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} is no composed reward, which has tables [[reward_parts]]: {error}") from error


async def composed(
    registry: Registry,
    reward: RewardSection,
    rules: RewardSection | PartsFile,
    *,
    beside: Path | None = None,
) -> Scorer:
    """A reward of several parts, by these `rules`. Functions of files are found `beside` it. Raises InvalidArgument."""
    scored = []
    for part in rules.reward_parts:
        name = part.scorer
        if beside and ".py:" in name and (beside / name.rpartition(":")[0]).is_file():
            name = str(beside / name)
        scorer = await scorer_named(registry, reward, name)
        label = part.name or part.scorer.rpartition(":")[2].rpartition("/")[2]
        weight = part.weight if part.weight is not None else float(part.gate is None)
        rule = Part(label, weight, part.gate, part.clip, dict(part.when) or None)
        scored.append(ScoredPart(rule, replace(scorer, key=part.key), dict(part.metadata_overrides)))
    if len({each.part.label for each in scored}) < len(scored):
        raise InvalidArgument("two parts of the reward have one name: give them a name", field="reward_parts")
    if not any(each.part.weight for each in scored):
        raise InvalidArgument("no part of the reward counts: give one a weight", field="reward_parts")
    version = digest_of([*_rules_of(rules), [each.scorer.version for each in scored]])
    labels = ", ".join(each.part.label for each in scored)
    composition = Composition(tuple(scored), rules.reward_combine, rules.reward_clip)
    return Scorer(COMPOSED, version, f"The {rules.reward_combine} of {labels}.", composition=composition)


def _rules_of(rules: RewardSection | PartsFile) -> list[Any]:
    """What a composed reward's version depends on, beside the scorers' own."""
    parts = [part.model_dump(mode="json") for part in rules.reward_parts]
    clip = [rules.reward_clip] if rules.reward_clip else []
    return [rules.reward_combine, parts, *clip]
