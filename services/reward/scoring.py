"""Scores a batch: every item finds its scorer, runs in a worker, and fails alone.

Consumes: batches of items. Waits for: free workers. Produces: one result an item, in order. A scorer's failure is a
ScoreError, never a reward. Items of a group scorer that came without the rest of their group are scored as given.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram

from headrace.errors import HeadraceError, Internal, InvalidArgument, NotFound, ResourceExhausted
from headrace.hooks import HookArgs, Reward, RewardForm, reward_hook
from headrace.limits import MAX_REMOTE_SECONDS, MAX_SCORE_ITEMS, MAX_SCORE_ITEMS_PER_CALLER, shown, to_json
from headrace.process.workers import WorkerCrashed, WorkerError, WorkerPool, WorkerRaised, WorkerTimeout
from headrace.rpc.log import log
from headrace.score import SCORER_ABSTAINED, SCORER_UNAVAILABLE, Score, ScoreError, ScoreItem, ScoreResult
from headrace.trajectory import check_reward
from services.reward.composition import combined, is_passed
from services.reward.live_scorers import LiveScorers
from services.reward.registry import (
    KILLED_BY,
    Builtin,
    Composition,
    CustomResult,
    Registry,
    Remote,
    ScoredPart,
    Scorer,
    own_function,
    run_builtin,
    run_builtin_within,
    run_custom,
    run_waiting_builtin,
    version_of,
)
from services.reward.scorers.answers import after_thinking, boxed

Choice = tuple[ScoreItem, Scorer] | ScoreError
"""An item with its scorer, or the error that it has none."""


class RewardMetrics:
    """Counts scored items by scorer and outcome, the time that they took, and how many wait."""

    def __init__(self) -> None:
        self._items = prometheus_client.Counter(
            "headrace_reward_items", "Scored items, by scorer and outcome.", ["scorer", "outcome"], registry=None
        )
        self._seconds = Histogram(
            "headrace_reward_seconds",
            "Seconds from the request to its scores, waiting included.",
            ["scorer"],
            registry=None,
        )
        self._waiting = Gauge("headrace_reward_waiting", "Calls that wait for a worker.", registry=None)

    def show(self, registry: CollectorRegistry, pool: WorkerPool) -> None:
        """Adds the metrics to the process's page."""
        self._waiting.set_function(lambda: pool.waiting)
        for metric in (self._items, self._seconds, self._waiting):
            registry.register(metric)

    def count(self, scorer: str, results: Iterable[ScoreResult]) -> None:
        outcomes = Counter(each.reason if isinstance(each, ScoreError) else "SCORED" for each in results)
        for outcome, number in outcomes.items():
            self._items.labels(scorer, outcome).inc(number)

    def observe(self, scorer: str, seconds: float) -> None:
        """Adds the time of one call."""
        self._seconds.labels(scorer).observe(seconds)


_BATCH_ITEMS = 64
_LOAD_SECONDS = 120.0
# Most answers take milliseconds. One that takes longer goes on where it holds up only its like.
_QUICK_CPU_SECONDS = 0.25
# On a machine that has this many times more to do, what needs its processor time still gets it.
_WALL_PER_CPU = 30.0
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class ScorerCall:
    """The items of one call of a scorer, by their positions in the batch."""

    scorer: Scorer
    items: Mapping[int, ScoreItem]


class BatchScorer:
    """Scores with the registry's scorers in the pool's workers; `slow_pool` takes the items that need longer."""

    def __init__(
        self,
        registry: Registry,
        pool: WorkerPool,
        slow_pool: WorkerPool,
        args: HookArgs,
        metrics: RewardMetrics,
        *,
        reward_key: str | None,
        timeout_seconds: float,
        live: LiveScorers | None = None,
    ) -> None:
        """`live` has the scorers that are set while the service runs."""
        self._live = live
        self.registry = registry
        self._pool = pool
        self._slow_pool = slow_pool
        self._args = args
        self._metrics = metrics
        self._reward_key = reward_key
        self._timeout_seconds = timeout_seconds
        self._in_flight: Counter[str] = Counter()
        self._calls = itertools.count(1)
        self._breakers: defaultdict[tuple[str, str], CircuitBreaker] = defaultdict(CircuitBreaker)
        self._known: OrderedDict[bytes, Reward] = OrderedDict()
        """Rewards of the latest items that were too slow or that a judge has graded, by digests of items and scorer."""

    async def score(
        self,
        items: Sequence[ScoreItem | ScoreError],
        requested: str | None = None,
        *,
        peer: str = "",
        evaluation: bool = False,
    ) -> list[ScoreResult]:
        """Returns one result an item, in order. Raises NotFound for `requested`, ResourceExhausted in a crowd.

        Nobody else scores the items of an `evaluation`: no candidate pays for them, and no shadow sees them.
        """
        scorer = self.registry.require(requested) if requested else None
        self._require_room(peer, len(items))
        self._in_flight[peer] += len(items)
        try:
            failures = await self._load_own(items)
            with self._live.call() if self._live else nullcontext():
                known = [_own_failure(item, failures) or item for item in items] if failures else items
                choices = [self._choice(item, scorer, evaluation) for item in known]
                results = await self._scored(choices, next(self._calls))
            if self._live and not evaluation:
                self._live.shadow(items, results, self.score_with)
            return results
        finally:
            self._in_flight[peer] -= len(items)
            if not self._in_flight[peer]:
                del self._in_flight[peer]

    async def _load_own(self, items: Sequence[ScoreItem | ScoreError]) -> dict[str, ScoreError]:
        """Loads functions that items name themselves, once each. Returns why some of them cannot be called."""
        failures: dict[str, ScoreError] = {}
        for path in {own_function(item) for item in items if isinstance(item, ScoreItem)}:
            if path is None or self.registry.knows(path):
                continue
            try:
                hook = await self._pool.run(
                    reward_hook, path, False, timeout_seconds=_LOAD_SECONDS, name=f"hook {path}"
                )
                if hook.form is RewardForm.BATCH:
                    raise InvalidArgument(
                        f"custom_rm_path {path} is a class; of a sample it is a function f(args, sample)"
                    )
                self.registry.add(hook)
            except (WorkerError, HeadraceError) as error:
                failures[path] = ScoreError("SCORER_UNKNOWN", error.message)
        return failures

    async def score_with(self, scorer: Scorer, items: Sequence[ScoreItem]) -> list[ScoreResult]:
        """Scores all items with one scorer, as nobody's call."""
        return await self._scored([(item, scorer) for item in items], next(self._calls))

    def _choice(self, item: ScoreItem | ScoreError, requested: Scorer | None, evaluation: bool) -> Choice:
        if isinstance(item, ScoreError):
            return item
        payer = self._live.payer_of(item.group_id, evaluation=evaluation) if self._live else None
        scorer = self.registry.choose(item, requested, payer)
        return scorer if isinstance(scorer, ScoreError) else (item, scorer)

    def _require_room(self, peer: str, count: int) -> None:
        for of, in_flight, most in (
            ("this connection's", self._in_flight[peer], MAX_SCORE_ITEMS_PER_CALLER),
            ("all callers'", self._in_flight.total(), MAX_SCORE_ITEMS),
        ):
            if in_flight and in_flight + count > most:
                raise ResourceExhausted(
                    f"{in_flight} of {of} items are being scored, and {most} is the limit: try again later, or "
                    "raise --reward-workers",
                    reason="QUEUE_FULL",
                )

    async def _scored(self, choices: Sequence[Choice], caller: int) -> list[ScoreResult]:
        results: dict[int, ScoreResult] = {i: c for i, c in enumerate(choices) if isinstance(c, ScoreError)}
        self._metrics.count("none", results.values())
        async with asyncio.TaskGroup() as tasks:
            for call in _calls_for({i: c for i, c in enumerate(choices) if not isinstance(c, ScoreError)}):
                tasks.create_task(self._run(call, results, caller))
        return [results[i] for i in range(len(choices))]

    async def _run(self, call: ScorerCall, results: dict[int, ScoreResult], caller: int) -> None:
        started = time.monotonic()
        batch = list(call.items.values())
        if call.scorer.composition is not None:
            scored = await self._composed(call.scorer, call.scorer.composition, batch)
        else:
            scored = await self._unless_unreachable(call.scorer, batch, caller)
        results.update(zip(call.items, scored, strict=True))
        self._metrics.count(call.scorer.name, scored)
        self._metrics.observe(call.scorer.name, time.monotonic() - started)

    async def _unless_unreachable(self, scorer: Scorer, batch: Sequence[ScoreItem], caller: int) -> list[ScoreResult]:
        """Asks the scorer, unless its server has been unreachable lately."""
        breaker = self._breakers[scorer.name, scorer.version]
        if not breaker.admits():
            message = f"scorer {scorer.name} could not be reached {FAILURES} times in a row: single calls try it"
            return [ScoreError(SCORER_UNAVAILABLE, message, retryable=True)] * len(batch)
        with breaker.call():
            try:
                scored = await self._asked(scorer, batch, caller)
            except (WorkerError, HeadraceError) as error:
                failure = _error_of(error, scorer)
                scored = [failure] * len(batch)
                ids = [item.item_id for item in batch]
                log.warning("not_scored", items=ids, scorer=scorer.name, reason=failure.reason, message=failure.message)
            if any(isinstance(each, ScoreError) and each.reason == SCORER_UNAVAILABLE for each in scored):
                breaker.not_reached()
            else:
                breaker.reached()
        return scored

    async def _asked(self, scorer: Scorer, batch: Sequence[ScoreItem], caller: int) -> list[ScoreResult]:
        if scorer.remote is not None:
            return await self._remote(scorer, scorer.remote, batch)
        if (builtin := scorer.builtin) is not None and builtin.is_quick:
            return [self._at_once(scorer, builtin, item) for item in batch]
        return [self._result(scorer, reward) for reward in await self._rewards(scorer, batch, caller)]

    def _at_once(self, scorer: Scorer, builtin: Builtin, item: ScoreItem) -> ScoreResult:
        try:
            return self._result(scorer, CustomResult(run_builtin(builtin.name, _seen_by(scorer, item))))
        except InvalidArgument as error:
            return ScoreError("SCORER_RAISED", error.message)

    async def _remote(self, scorer: Scorer, remote: Remote, batch: Sequence[ScoreItem]) -> list[ScoreResult]:
        """The scores of another service, which names its scorer; the version says where that service is."""
        seconds = min(self._timeout_seconds * len(batch), MAX_REMOTE_SECONDS)
        results = await remote.client.ask(batch, remote.scorer, deadline_seconds=seconds)
        return [_of_remote(scorer, remote, each) for each in results]

    async def _composed(
        self, scorer: Scorer, composition: Composition, batch: Sequence[ScoreItem]
    ) -> list[ScoreResult]:
        """Asks the gates first, and of what passes them the other parts. A part's error is the item's."""
        given: list[dict[str, ScoreResult]] = [{} for _ in batch]
        for gates in (True, False):
            async with asyncio.TaskGroup() as tasks:
                for part in composition.parts:
                    if (part.part.gate is not None) is gates:
                        chosen = [
                            i
                            for i, item in enumerate(batch)
                            if part.part.scores(item.metadata) and is_passed(composition.rules, _values(given[i]))
                        ]
                        tasks.create_task(self._score_part(part, {i: batch[i] for i in chosen}, given))
        return [_composed_result(scorer, composition, each) for each in given]

    async def _score_part(
        self, part: ScoredPart, items: Mapping[int, ScoreItem], given: Sequence[dict[str, ScoreResult]]
    ) -> None:
        results = await self.score_with(part.scorer, [part.seen(item) for item in items.values()])
        for i, result in zip(items, results, strict=True):
            given[i][part.part.label] = _result_of_part(part, result)

    async def _rewards(self, scorer: Scorer, batch: Sequence[ScoreItem], caller: int) -> list[CustomResult]:
        if scorer.builtin is not None:
            item = replace(_seen_by(scorer, batch[0]), columns={})
            return [CustomResult(await self._builtin(scorer, scorer.builtin, item, caller))]
        if scorer.hook is None:
            raise Internal(f"scorer {scorer.name} has nothing that scores")
        rewards: list[CustomResult] = await (scorer.workers or self._pool).run(
            run_custom,
            scorer.hook.path,
            scorer.hook.form,
            self._args,
            batch,
            timeout_seconds=self._timeout_seconds * len(batch),
            name=f"hook {scorer.hook.path}",
            caller=caller,
        )
        if len(rewards) != len(batch):  # headrace's own half of the worker sees to it, unless user code changed it
            raise Internal(f"hook {scorer.hook.path} answered {len(rewards)} rewards for {len(batch)} items")
        return rewards

    async def _builtin(self, scorer: Scorer, builtin: Builtin, item: ScoreItem, caller: int) -> Reward | None:
        said = (scorer.name, scorer.version, item.prompt, item.label, item.response, item.metadata)
        digest = hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        if builtin.cpu_seconds is None:
            seconds, name = min(self._timeout_seconds, builtin.max_seconds), f"scorer {scorer.name}"
            run: Any = run_waiting_builtin if builtin.waits else run_builtin
            given = [self._args] if builtin.remote or builtin.takes_args else []
            reward: Reward | None = await (scorer.workers or self._pool).run(
                run, builtin.name, item, *given, timeout_seconds=seconds, name=name, caller=caller
            )
            return self._remembered(digest, reward) if builtin.cached and reward is not None else reward
        for pool, cpu_seconds in (
            (scorer.workers or self._pool, _QUICK_CPU_SECONDS),
            (self._slow_pool, builtin.cpu_seconds),
        ):
            in_time = await self._in_time(pool, builtin, item, cpu_seconds, caller)
            if in_time is not None:
                return in_time
        log.info("too_slow_to_score", item=item.item_id, scorer=scorer.name, cpu_seconds=builtin.cpu_seconds)
        return self._remembered(digest, builtin.wrong)

    def _remembered(self, digest: bytes, reward: Reward) -> Reward:
        self._known[digest] = reward
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return reward

    async def _in_time(
        self, pool: WorkerPool, builtin: Builtin, item: ScoreItem, cpu_seconds: float, caller: int
    ) -> Reward | None:
        """Returns None when the item takes more processor time."""
        seconds = max(self._timeout_seconds, _WALL_PER_CPU * cpu_seconds)
        work = (run_builtin_within, builtin.name, item, cpu_seconds)
        try:
            reward: Reward | None = await pool.run(
                *work, timeout_seconds=seconds, name=f"scorer {builtin.name}", caller=caller
            )
        except WorkerCrashed as error:
            if error.returncode != -KILLED_BY:
                raise
            return None
        return reward

    def _result(self, scorer: Scorer, result: CustomResult) -> ScoreResult:
        reward = result.reward
        if reward is None:
            return ScoreError(SCORER_ABSTAINED, f"scorer {scorer.name} gave no reward: it abstains")
        if isinstance(reward, str):
            return ScoreError("SCORER_NOT_FINITE", reward)
        parts: Mapping[str, float] = {}
        if isinstance(reward, dict):
            parts = reward
            key = scorer.key or self._reward_key
            part = key or (scorer.builtin and scorer.builtin.part)
            if part not in reward:
                names = f"gave the parts {shown(sorted(reward))}"
                way = f"--reward-key {key} is not one of them, or not a number" if key else "set --reward-key"
                return ScoreError("SCORER_RAISED", f"scorer {scorer.name} {names}: {way}")
            reward = reward[part]
        try:
            for value in (reward, *parts.values()):
                check_reward("a reward", value)
            if result.metadata:
                to_json(result.metadata)
        except InvalidArgument as error:
            return ScoreError("SCORER_NOT_FINITE", f"scorer {scorer.name}: {error.message}")
        hook = scorer.hook
        version = version_of(hook, result.version, scorer.settings) if hook and result.version else scorer.version
        return Score(reward, scorer.name, version, parts, result.metadata)


def _own_failure(item: ScoreItem | ScoreError, failures: Mapping[str, ScoreError]) -> ScoreError | None:
    return failures.get(own_function(item) or "") if isinstance(item, ScoreItem) else None


def _seen_by(scorer: Scorer, item: ScoreItem) -> ScoreItem:
    """For a `boxed` scorer its response is the last box."""
    return replace(item, response=boxed(after_thinking(item.response)) or "") if scorer.boxed else item


def _calls_for(chosen: Mapping[int, tuple[ScoreItem, Scorer]]) -> list[ScorerCall]:
    """Makes a call for each group of a group scorer, 64 items of a model class or a quick scorer, each other item.

    Another service and a composition, which may have scorers of groups, get all items at once.
    """
    together: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for position, (item, scorer) in chosen.items():
        together[scorer.name, scorer.version, _key(scorer, item, position)].append(position)
    calls = []
    for positions in together.values():
        scorer = chosen[positions[0]][1]
        is_limited = _is_quick(scorer) or (scorer.hook and scorer.hook.form is RewardForm.BATCH)
        size = _BATCH_ITEMS if is_limited else len(positions)
        for start in range(0, len(positions), size):
            calls.append(ScorerCall(scorer, {i: chosen[i][0] for i in positions[start : start + size]}))
    return calls


def _key(scorer: Scorer, item: ScoreItem, position: int) -> str:
    hook = scorer.hook
    if scorer.remote or scorer.composition or _is_quick(scorer):
        return "all"
    if hook and hook.form in (RewardForm.GROUP, RewardForm.COMPLETIONS):
        return item.group_id
    if hook and hook.form is RewardForm.BATCH:
        return "all"
    return str(position)


def _is_quick(scorer: Scorer) -> bool:
    return scorer.builtin is not None and scorer.builtin.is_quick


def _of_remote(scorer: Scorer, remote: Remote, result: ScoreResult) -> ScoreResult:
    if not isinstance(result, Score):
        return result
    if scorer.key and scorer.key not in result.parts:
        there = shown(sorted(result.parts))
        return ScoreError("SCORER_RAISED", f"{remote.url} gave the parts {there}, without the key {scorer.key}")
    value = result.parts[scorer.key] if scorer.key else result.value
    return replace(result, value=value, scorer_version=f"{remote.url} {result.scorer_version}")


def _values(given: Mapping[str, ScoreResult]) -> dict[str, float]:
    return {label: result.value for label, result in given.items() if isinstance(result, Score)}


def _result_of_part(part: ScoredPart, result: ScoreResult) -> ScoreResult:
    if not isinstance(result, Score):
        return replace(result, message=f"{part.part.label}: {result.message}")
    return replace(result, value=part.part.clipped(result.value))


def _composed_result(scorer: Scorer, composition: Composition, given: Mapping[str, ScoreResult]) -> ScoreResult:
    errors = [each for each in given.values() if isinstance(each, ScoreError) and each.reason != SCORER_ABSTAINED]
    if errors:
        return next((error for error in errors if not error.retryable), errors[0])
    values = _values(given)
    value = combined(composition.rules, values, composition.combine, composition.clip)
    if value is None:
        return ScoreError(SCORER_ABSTAINED, "no part of the reward that counts has scored it")
    return Score(value, scorer.name, scorer.version, values)


_AWAY = frozenset(
    {
        *("Unavailable", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"),
        *("BrokenPipeError", "ClientConnectorError", "ServerDisconnectedError", "ConnectError", "ConnectTimeout"),
        *("APIConnectionError", "APITimeoutError", "RateLimitError", "InternalServerError"),
    }
)
"""Exceptions of a user's function whose server is unreachable: of Python, aiohttp, httpx, requests and openai."""


def _is_away(error: WorkerRaised, scorer: Scorer) -> bool:
    """True where the scorer's server is unreachable or busy, and the sample is not at fault."""
    if scorer.builtin is not None:
        return scorer.builtin.remote and not error.is_ours
    return error.kind in _AWAY


def _error_of(error: WorkerError | HeadraceError, scorer: Scorer) -> ScoreError:
    match error:
        case InvalidArgument() | NotFound():
            return ScoreError("SCORER_UNKNOWN", error.message)
        case HeadraceError():
            return ScoreError(SCORER_UNAVAILABLE, error.message, retryable=True)
        case WorkerRaised() if _is_away(error, scorer):
            return ScoreError(SCORER_UNAVAILABLE, error.message, retryable=True)
        case WorkerTimeout():
            return ScoreError("SCORER_TIMEOUT", error.message, retryable=True)
        case WorkerCrashed():
            return ScoreError("SCORER_CRASHED", error.message, retryable=True)
        case WorkerRaised():
            return ScoreError("SCORER_RAISED", error.message, retryable=not error.is_ours)
        case _:
            raise error


FAILURES = 5
"""Calls in a row that open it."""
_TRY_SECONDS = 2.0


class CircuitBreaker:
    """Spares a scorer whose server is unreachable: after some calls in a row that failed, one at a time tries it.

    Closed: every call is made. Open: a call is refused at once, but one every `_TRY_SECONDS`, which closes it when the
    server answers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._is_trying = False
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    def admits(self) -> bool:
        """True for a call that may be made now."""
        return not self.is_open or (not self._is_trying and self._clock() >= self._next_try)

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call that was admitted. It says with `reached` or `not_reached` what came of it."""
        is_try = self.is_open
        self._is_trying |= is_try
        try:
            yield
        finally:
            if is_try:
                self._is_trying = False

    def reached(self) -> None:
        self._failures = 0

    def not_reached(self) -> None:
        self._failures += 1
        self._next_try = self._clock() + _TRY_SECONDS
