"""Builds the reward service (workers, registry, scorer, server), and translates its protos."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from headrace.api.reward.v1 import reward_pb2
from headrace.api.reward.v1 import reward_pb2 as pb
from headrace.api.reward.v1.reward_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server
from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import HookArgs, RewardForm, RewardHook, reward_hook
from headrace.job.schema.services import RewardSection
from headrace.limits import (
    MAX_SCORE_ITEMS,
    MAX_SCORE_ITEMS_PER_CALL,
    MAX_SCORE_REQUEST_BYTES,
)
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.server import Listen, RpcServer, Service
from headrace.run_folder import RunFolder
from headrace.score import ScoreError, ScoreItem, pack_result
from headrace.shadow_log import ShadowLog
from services.reward.live_scorers import (
    LOAD_SECONDS,
    LiveScorers,
    builtins_of,
    composed,
    require_settings,
    settings_of,
    workers_for,
)
from services.reward.registry import Registry, prepare_slow
from services.reward.scoring import BatchScorer, RewardMetrics
from services.reward.swap import NamedScorer, SwapFile

_BYTES_IN_A_TURN = 256 << 10


class RewardServicer(RewardServiceServicer):
    def __init__(self, batch_scorer: BatchScorer, live: LiveScorers) -> None:
        self._live = live
        self._scorer = batch_scorer

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        if not 1 <= len(request.items) <= MAX_SCORE_ITEMS_PER_CALL:
            raise InvalidArgument(
                f"{len(request.items)} items: send 1 to {MAX_SCORE_ITEMS_PER_CALL} in a call", field="items"
            )
        ids = [item.item_id for item in request.items]
        if len(set(ids)) < len(ids):
            raise InvalidArgument("two items have the same item_id: it must be unique in the call", field="items")
        items = await _unpacked_in_turns(request)
        results = await self._scorer.score(
            items, request.scorer or None, peer=context.peer(), evaluation=request.evaluation
        )
        return pb.ScoreResponse(results=[pack_result(*pair) for pair in zip(ids, results, strict=True)])

    async def ListScorers(self, request: pb.ListScorersRequest, context: Any) -> pb.ListScorersResponse:
        default = self._scorer.registry.default
        return pb.ListScorersResponse(
            scorers=[
                pb.Scorer(name=s.name, version=s.version, description=s.description, is_default=s.name == default)
                for s in self._scorer.registry.all()
            ]
        )

    async def ChangeScorer(self, request: pb.ChangeScorerRequest, context: Any) -> pb.ChangeScorerResponse:
        await self._live.change(request)
        return pb.ChangeScorerResponse(state=self._state())

    async def GetScorerState(self, request: pb.GetScorerStateRequest, context: Any) -> pb.GetScorerStateResponse:
        return pb.GetScorerStateResponse(state=self._state())

    def _state(self) -> pb.ScorerState:
        swap, counts, trial = self._live.swap, self._live.counts, self._live.swap.trial
        return pb.ScorerState(
            live=_packed(swap.live),
            candidate=_packed(trial.scorer) if trial else None,
            candidate_pays=trial is not None and trial.pays,
            share=trial.share if trial else 0.0,
            former=[_packed(each) for each in swap.former],
            changes=swap.changes,
            shadow=pb.ShadowCounts(**asdict(counts)),
        )


def _packed(scorer: NamedScorer) -> pb.ScorerVersion:
    return pb.ScorerVersion(scorer=scorer.name, version=scorer.version)


async def _unpacked_in_turns(request: pb.ScoreRequest) -> list[ScoreItem | ScoreError]:
    """All items, without holding up the event loop."""
    items, num_bytes = list[ScoreItem | ScoreError](), 0
    for packed in request.items:
        num_bytes += packed.ByteSize()
        if num_bytes > _BYTES_IN_A_TURN:
            num_bytes = 0
            await asyncio.sleep(0)
        items.append(_unpacked(packed))
    return items


def _unpacked(packed: pb.ScoreItem) -> ScoreItem | ScoreError:
    """Turns what is wrong with one item into that item's own error."""
    try:
        return ScoreItem.unpack(packed)
    except InvalidArgument as error:
        return ScoreError("ITEM_INVALID", error.message)


NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


class RewardServer:
    """A running reward service. `start` builds it; `stop` or a signal ends it."""

    def __init__(self, rpc: RpcServer, pool: WorkerPool, slow_pool: WorkerPool, live: LiveScorers) -> None:
        self.rpc = rpc
        self.pool = pool
        self._slow_pool = slow_pool
        self._live = live

    @classmethod
    async def start(
        cls,
        reward: RewardSection,
        args: HookArgs,
        listen: Listen,
        *,
        of_evaluations: Sequence[str] = (),
        folder: RunFolder | None = None,
    ) -> RewardServer:
        """Returns when it serves; `of_evaluations` are functions of single evaluations, by path.

        In `folder` it keeps which scorer pays, and what a shadow said; without one a restart forgets both. Raises
        ConfigError for a wrong hook or rm_type, Unavailable for a port in use.
        """
        hook = await describe(reward)
        registry = await registry_of(reward, hook, await describe_each(of_evaluations))
        pool, slow_pool = worker_pool(reward, registry), slow_worker_pool(reward, registry)
        metrics = RewardMetrics()
        live = LiveScorers(
            registry,
            reward,
            SwapFile(folder.scorer_state if folder else None),
            ShadowLog(folder.shadow) if folder else None,
        )
        batch_scorer = BatchScorer(
            registry,
            pool,
            slow_pool,
            args,
            metrics,
            reward_key=reward.reward_key,
            timeout_seconds=reward.reward_timeout_seconds,
            live=live,
        )
        service = Service(RewardServicer(batch_scorer, live), add_RewardServiceServicer_to_server, NAME)
        rpc = RpcServer(
            "reward",
            listen.address,
            [service],
            metrics_address=listen.metrics_address,
            insecure=listen.insecure,
            tls=listen.tls,
            tokens=listen.tokens,
            request_bytes={"Score": MAX_SCORE_REQUEST_BYTES},
        )
        metrics.show(rpc.metrics.registry, pool)
        async with AsyncExitStack() as on_failure:  # whatever it is, the workers must not stay behind
            on_failure.push_async_callback(pool.close)
            await live.load()
            on_failure.push_async_callback(live.close)
            try:
                await pool.start()
            except WorkerError as error:
                raise ConfigError(error.message) from error
            await rpc.start()
            on_failure.pop_all()
        return cls(rpc, pool, slow_pool, live)

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, drains, and ends the workers."""
        try:
            await self.rpc.run_until_signal()
        finally:
            await self._close()

    async def stop(self, grace_seconds: float) -> None:
        """Drains and ends the workers."""
        await self.rpc.stop(grace_seconds)
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(self._live.close(), self.pool.close(), self._slow_pool.close())


async def describe_each(paths: Sequence[str]) -> list[RewardHook]:
    """The functions of single evaluations. Raises ConfigError for one that cannot be called with a sample."""
    found = await _loaded(paths) if paths else []
    for hook in found:
        if hook.form is RewardForm.BATCH:
            raise ConfigError(
                f"{hook.path} is a class made with a model's folder, which no data set has: its custom_rm_path is a "
                "function f(args, sample)"
            )
    return found


async def describe(reward: RewardSection) -> RewardHook | None:
    """The user's function, if there is one. Raises ConfigError for a wrong one, and for a server that is not named."""
    if reward.judge_url is not None and reward.judge_model is None:
        raise ConfigError(
            f"judge_url {reward.judge_url}: set --judge-model to the model it serves", field="judge_model"
        )
    await require_settings(reward, reward.rm_type or "")
    if reward.custom_rm_path is None:
        if reward.group_rm:
            raise ConfigError("--group-rm says how --custom-rm-path is called: give that too, or leave it out")
        return None
    (hook,) = await _loaded([reward.custom_rm_path], groups=reward.group_rm)
    if hook.form is RewardForm.BATCH and reward.reward_model_path is None:
        raise ConfigError(f"{hook.path} is a class made with a model's folder: set --reward-model-path")
    return hook


async def _loaded(paths: Sequence[str], *, groups: bool = False) -> list[RewardHook]:
    """Functions as a worker finds them. Raises ConfigError for a wrong one."""
    pool = WorkerPool(1)
    try:
        return [await pool.run(reward_hook, path, groups, timeout_seconds=LOAD_SECONDS) for path in paths]
    except WorkerError as error:
        raise ConfigError(error.message) from error
    finally:
        await pool.close()


async def registry_of(reward: RewardSection, hook: RewardHook | None, evaluations: Sequence[RewardHook]) -> Registry:
    """The scorers of a job. Raises ConfigError for a part of its reward that cannot be loaded."""
    registry = Registry.of(reward.rm_type, hook, evaluations, settings_of(reward))
    if not reward.reward_parts:
        return registry
    try:
        return registry.with_default(await composed(registry, reward, reward))
    except InvalidArgument as error:
        raise ConfigError(f"reward_parts: {error.message}", field="reward_parts") from error


def worker_pool(reward: RewardSection, registry: Registry) -> WorkerPool:
    return workers_for(reward, registry.require(registry.default) if registry.default else None)


def slow_worker_pool(reward: RewardSection, registry: Registry) -> WorkerPool:
    """Makes the pool for answers that take long to grade. Its workers start when they are needed."""
    return WorkerPool(
        reward.reward_workers,
        max_waiting=MAX_SCORE_ITEMS,
        prepare=partial(prepare_slow, builtins_of(registry.require(registry.default)) if registry.default else ()),
        prepare_seconds=LOAD_SECONDS,
    )
