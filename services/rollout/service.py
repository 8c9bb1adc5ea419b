"""The running rollout service: it starts and stops engines, router, producers and the user's functions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.api.sample.v1 import sample_pb2
from headrace.client.open import Buffer
from headrace.errors import FailedPrecondition, HeadraceError
from headrace.rpc.http_server import EndpointServer
from headrace.rpc.log import log
from services.rollout.adapters import NamedAdapters
from services.rollout.admission import EngineSlots, Kind, LoadWatch
from services.rollout.agents.hosts import AgentHosts
from services.rollout.engine.api import NOTHING_YET, Generation, SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Fleet
from services.rollout.engine.router import Router
from services.rollout.engine.scaling import NO_ENGINES, Scaler
from services.rollout.engine.weights import ServedWeights
from services.rollout.engine_memory import EngineMemory
from services.rollout.evaluation.runner import EvalRunner
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import Generator
from services.rollout.production.groups import Teacher
from services.rollout.production.hooks import GroupFilter
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import Sampler, merged_params
from services.rollout.publication.receiver import Receiver
from services.rollout.runs import Runs
from services.rollout.scoring import SampleScorer


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """The parts that the servicer calls."""

    encoder: PromptEncoder
    generator: Generator
    sampler: Sampler
    scorer: SampleScorer
    evaluator: EvalRunner
    fleet: Fleet
    weights: ServedWeights
    """Those of the run, which may be one of several on the fleet."""
    runs: Runs[RolloutParts] | None
    """The others that join; None in the part of one that has."""
    scaler: Scaler
    receiver: Receiver
    producer: Producer
    engine_memory: EngineMemory | None
    """On devices that engines share with the trainer."""
    metrics: RolloutMetrics
    slots: EngineSlots
    params: SamplingParams
    generate_seconds: float
    router_url: str | None
    """None in a run without engines."""
    agent_hosts: AgentHosts | None
    """Lends the job's tasks, where other processes play them."""
    warnings: Sequence[str]
    """Warnings for people about the samples; the list grows."""
    router: EngineClient
    adapters: NamedAdapters

    def require_engines(self) -> None:
        """Raises FailedPrecondition in a run that has none."""
        if self.router_url is None:
            raise FailedPrecondition(NO_ENGINES)

    async def ask(
        self,
        prompt: EncodedPrompt,
        sampling: sample_pb2.SamplingParams,
        begun: Generation = NOTHING_YET,
        adapter: str = "",
    ) -> AsyncGenerator[Generation, None]:
        """Streams one response to a client, once it has a slot; both take at most the limit of a generation."""
        self.require_engines()
        params, end = merged_params(sampling, self.params), time.monotonic() + self.generate_seconds
        async with self.slots.slot(Kind.CLIENTS, seconds=self.generate_seconds):
            pieces = self.generator.stream(
                prompt.tokens,
                params,
                request_id=f"generate-{uuid.uuid4().hex}",
                seconds=end - time.monotonic(),
                images=prompt.for_engine,
                begun=begun,
                adapter=adapter,
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    @asynccontextmanager
    async def adapter(self, folder: str) -> AsyncIterator[str]:
        """The adapter that a request names, in all engines until the block ends; empty for none."""
        if not folder:
            yield ""
            return
        self.require_engines()
        async with self.adapters.using(Path(folder), seconds=self.generate_seconds) as name:
            yield name

    async def score(self, prompt: EncodedPrompt, adapter: str) -> list[float]:
        """Log-probs of the prompt's tokens but the first, at temperature 1."""
        async with self.slots.slot(Kind.CLIENTS, seconds=self.generate_seconds):
            cache_key = self.fleet.weights.cache_key
            return await self.router.score(
                prompt.tokens, cache_key=cache_key, seconds=self.generate_seconds, adapter=adapter
            )


class Startable(Protocol):
    """A part that runs the user's functions in processes of their own."""

    async def start(self) -> None:
        """Raises ConfigError for a function that cannot be loaded."""

    async def close(self) -> None:
        """Ends the processes."""


_RETURN_SECONDS = 2.0
"""For the leases of a run that leaves: its ledger may have died with it, and other runs wait for what it holds."""


class RolloutService:
    """States: built → started → stopped."""

    def __init__(
        self,
        parts: RolloutParts,
        router: Router | None,
        router_client: EngineClient,
        buffer: Buffer,
        *,
        custom: Sequence[Startable],
        endpoint: EndpointServer | None,
        group_filter: GroupFilter | None,
        teacher: Teacher | None,
        conversations: PromptEncoder | None = None,
        load_watch: LoadWatch | None = None,
        is_joined: bool = False,
    ) -> None:
        """`router`: None without engines of its own; `is_joined`: it uses those of another run."""
        self._is_joined = is_joined
        self.parts = parts
        self._encoders = [parts.encoder, *([conversations] if conversations else [])]
        self._router = router
        self._router_client = router_client
        self._buffer = buffer
        self._custom = custom
        self._endpoint = endpoint
        self._filter = group_filter
        self._teacher = teacher
        self.load_watch = load_watch
        self._router_supervised: asyncio.Task[None] | None = None
        self.started = asyncio.Event()
        self._first_start: asyncio.Task[None] | None = None

    def adopt_listener(self, descriptor: int) -> None:
        """The endpoint's socket, which outlives this process; it does nothing without an endpoint."""
        if self._endpoint:
            self._endpoint.adopt(descriptor)

    async def start(self) -> None:
        """Starts engines and router, then production.

        Raises Unavailable when one of them does not start, ConfigError when there is no tokenizer. The tokenizer and
        the user's functions are loaded while the engines start, which takes longer.
        """
        hooks = [hook.start() for hook in (*self._custom, self._filter) if hook]
        starts = [asyncio.create_task(each) for each in (self._start_engines(), self._load_tokenizers(), *hooks)]
        try:
            await asyncio.gather(*starts)
            if self._endpoint:
                await self._endpoint.start()
                log.info("openai_endpoint", url=f"{self._endpoint.url}/v1")
        except HeadraceError:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        self.started.set()
        self.parts.producer.start()
        if self.load_watch:
            self.load_watch.start()

    async def _start_engines(self) -> None:
        if self._router is None:
            return
        log.info("router_starting")
        await self._router.start()
        self._router_supervised = asyncio.create_task(self._router.supervise())
        if self.parts.engine_memory is None:
            await self.parts.fleet.start()
        else:  # when the trainer gives them the devices, for which this service must answer
            self._first_start = asyncio.create_task(self.parts.fleet.start())

    async def _load_tokenizers(self) -> None:
        for encoder in self._encoders:
            await encoder.off_loop(encoder.load)

    async def lost(self) -> None:
        """Raises Unavailable once the router cannot be replaced, or no engine is left, which ends this service."""
        if self._router is None:
            await asyncio.Event().wait()
        assert self._router_supervised is not None, "the service was not started"
        starting = [self._first_start] if self._first_start else []
        await asyncio.gather(self._router_supervised, self.parts.fleet.lost(), *starting)

    async def drain(self) -> None:
        """Takes no more groups and no more requests of OpenAI's protocol; those that have begun may finish."""
        self.parts.producer.pause()
        if self._endpoint:
            await self._endpoint.stop()

    async def stop(self) -> None:
        """Returns leases, then ends engines and router, unless they are another run's."""
        if self.load_watch:
            await self.load_watch.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETURN_SECONDS if self._is_joined else None):
                await self.parts.producer.drain()
        if self._endpoint:
            await self._endpoint.stop()
        if self.parts.engine_memory:
            await self.parts.engine_memory.stop()
        if self.parts.runs:
            await self.parts.runs.stop()
        if self._is_joined:
            await self.parts.receiver.leave()
            self.parts.metrics.forget()
        else:
            await self.parts.receiver.close()
            await self._stop_engines()
        for each in self._custom:
            await each.close()
        if self._filter:
            await self._filter.close()
        if self._teacher:
            await self._teacher.close()
        for encoder in self._encoders:
            encoder.close()
        await asyncio.gather(self._router_client.close(), self._buffer.close(), self.parts.scorer.close())

    async def _stop_engines(self) -> None:
        await self.parts.scaler.stop()
        going_on = [task for task in (self._router_supervised, self._first_start) if task]
        for task in going_on:
            task.cancel()
        await asyncio.gather(*going_on, return_exceptions=True)
        await asyncio.gather(self.parts.fleet.stop(), *([self._router.stop()] if self._router else []))
