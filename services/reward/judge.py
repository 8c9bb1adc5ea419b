"""Judging a batch: every item finds its scorer, runs in a worker, and fails alone.

consumes: batches of items; waits for: worker places; produces: one judgement an item, in order. A failure of a scorer
is a ScoreError, never a reward. Items of a group scorer that came without the rest of their group are judged as given.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ResourceExhausted
from headrace.hooks import HookArgs, Reward, RewardForm, RewardHook
from headrace.judgement import Judgement, Score, ScoreError, ScoreItem
from headrace.rpc.log import log
from headrace.workers import WorkerCrashed, WorkerError, WorkerPool, WorkerRaised, WorkerTimeout
from services.reward.builtin import run_builtin
from services.reward.custom import run_custom
from services.reward.metrics import RewardMetrics
from services.reward.registry import Registry, Scorer

MAX_ITEMS_IN_FLIGHT = 16_384
_BATCH_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Work:
    """Items that one call of a scorer judges, by their positions in the batch."""

    scorer: Scorer
    positions: Sequence[int]


class Judge:
    """Judges with the registry's scorers in the pool's workers."""

    def __init__(
        self,
        registry: Registry,
        pool: WorkerPool,
        args: HookArgs,
        metrics: RewardMetrics,
        *,
        reward_key: str | None,
        timeout_seconds: float,
    ) -> None:
        self.registry = registry
        self._pool = pool
        self._args = args
        self._metrics = metrics
        self._reward_key = reward_key
        self._timeout_seconds = timeout_seconds
        self._in_flight = 0

    async def judge(self, items: Sequence[ScoreItem], requested: str | None = None) -> list[Judgement]:
        """One judgement an item, in order. Raises NotFound for `requested`, ResourceExhausted when too much waits."""
        scorer = self.registry.require(requested) if requested else None
        if self._in_flight and self._in_flight + len(items) > MAX_ITEMS_IN_FLIGHT:
            raise ResourceExhausted(
                f"{self._in_flight} items are being judged and {MAX_ITEMS_IN_FLIGHT} is the limit: come back later, or "
                "raise --reward-workers",
                reason="QUEUE_FULL",
            )
        self._in_flight += len(items)
        try:
            return await self._judge(items, [self.registry.choose(item, scorer) for item in items])
        finally:
            self._in_flight -= len(items)

    async def _judge(self, items: Sequence[ScoreItem], chosen: Sequence[Scorer | ScoreError]) -> list[Judgement]:
        results: dict[int, Judgement] = {i: c for i, c in enumerate(chosen) if isinstance(c, ScoreError)}
        for error in results.values():
            self._metrics.count("none", error)
        scorers = {i: c for i, c in enumerate(chosen) if isinstance(c, Scorer)}
        async with asyncio.TaskGroup() as tasks:
            for work in _works(items, scorers):
                tasks.create_task(self._run(work, items, results))
        return [results[i] for i in range(len(items))]

    async def _run(self, work: Work, items: Sequence[ScoreItem], results: dict[int, Judgement]) -> None:
        started = time.monotonic()
        batch = [items[i] for i in work.positions]
        try:
            rewards = await self._rewards(work.scorer, batch)
            judgements = [self._judgement(work.scorer, reward) for reward in rewards]
        except WorkerError as error:
            failure = _error_of(error)
            judgements = [failure] * len(batch)
            ids = [item.item_id for item in batch]
            log.warning(
                "not_judged", items=ids, scorer=work.scorer.name, reason=failure.reason, message=failure.message
            )
        for position, judgement in zip(work.positions, judgements, strict=True):
            results[position] = judgement
            self._metrics.count(work.scorer.name, judgement)
        self._metrics.observe(work.scorer.name, time.monotonic() - started)

    async def _rewards(self, scorer: Scorer, batch: Sequence[ScoreItem]) -> list[Reward]:
        if scorer.hook is None:
            limit, name = self._timeout_seconds, f"scorer {scorer.name}"
            return [await self._pool.run(run_builtin, scorer.name, batch[0], timeout_seconds=limit, name=name)]
        rewards: list[Reward] = await self._pool.run(
            *(run_custom, scorer.hook.path, scorer.hook.form, self._args, batch),
            timeout_seconds=self._timeout_seconds * len(batch),
            name=f"hook {scorer.hook.path}",
        )
        return rewards

    def _judgement(self, scorer: Scorer, reward: Reward) -> Judgement:
        if not isinstance(reward, dict):
            return Score(reward, scorer.name, scorer.version)
        if self._reward_key not in reward:
            wanted = f"--reward-key {self._reward_key} is not one of them" if self._reward_key else "set --reward-key"
            return ScoreError("SCORER_RAISED", f"scorer {scorer.name} gave the parts {sorted(reward)}: {wanted}")
        return Score(reward[self._reward_key], scorer.name, scorer.version, reward)


def _works(items: Sequence[ScoreItem], scorers: dict[int, Scorer]) -> list[Work]:
    """Groups for group scorers, batches for model classes, single items for all others."""
    together: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, scorer in scorers.items():
        together[scorer.name, _key(scorer.hook, items[position], position)].append(position)
    works = []
    for positions in together.values():
        scorer = scorers[positions[0]]
        size = _BATCH_ITEMS if scorer.hook and scorer.hook.form is RewardForm.BATCH else len(positions)
        works += [Work(scorer, positions[i : i + size]) for i in range(0, len(positions), size)]
    return works


def _key(hook: RewardHook | None, item: ScoreItem, position: int) -> str:
    if hook and hook.form is RewardForm.GROUP:
        return item.group_id
    if hook and hook.form is RewardForm.BATCH:
        return "all"
    return str(position)


def _error_of(error: WorkerError) -> ScoreError:
    match error:
        case WorkerTimeout():
            return ScoreError("SCORER_TIMEOUT", error.message, retryable=True)
        case WorkerCrashed():
            return ScoreError("SCORER_CRASHED", error.message, retryable=True)
        case WorkerRaised(kind="NotFinite"):
            return ScoreError("SCORER_NOT_FINITE", error.message)
        case WorkerRaised():
            return ScoreError("SCORER_RAISED", error.message, retryable=not error.is_ours)
        case _:
            raise error
