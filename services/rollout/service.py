"""The running rollout service: it starts and stops engines, router, producers and the user's functions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pydantic

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.open import Buffer
from headrace.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.job.schema.job import Job
from headrace.models.folders import base_digest
from headrace.rpc.http_server import EndpointServer
from headrace.rpc.log import kept_running, log
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
from services.rollout.fleet_build import adapted_layers
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import Generator
from services.rollout.production.groups import Teacher
from services.rollout.production.hooks import GroupFilter
from services.rollout.production.producer import Producer
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import Sampler, merged_params
from services.rollout.publication.receiver import Receiver
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
    runs: Runs | None
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


# Several runs on one service's engines: each has adapters, producers, a scorer and a ledger of its own.
#
# JoinRun ──► joined ──(LeaveRun, or no JoinRun for LEASE_SECONDS)──► leaving ──► gone
# A run's part is what a service for it alone would be, without engines. All parts wait for their turn at the engines:
# each has an even share of the slots, and borrows what others leave free. The run that the service was started for is
# always there.

LEASE_SECONDS = 15.0
_REJOIN_SECONDS = 2.0


@dataclass
class _Joined:
    job_json: str
    service: RolloutService
    heard_at: float


class Runs:
    """The runs beside the service's own."""

    def __init__(
        self,
        own: Job,
        service_of: Callable[[Job], RolloutService],
        turns: EngineSlots,
        slots: int,
        ended: Callable[[str], None],
    ) -> None:
        """`slots`: the requests that all runs together have at the engines while several have some.

        `ended` is told of background work that broke off.
        """
        self._own = own
        self._service_of = service_of
        self._turns = turns
        self._ended = ended
        self._slots = slots
        self._joined: dict[str, _Joined] = {}
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._digest: str | None = None

    @property
    def most(self) -> int:
        """How many there may be with the service's own."""
        return self._own.services.rollout_runs

    def parts_of(self, run: str, own: RolloutParts) -> RolloutParts:
        """Raises Unavailable for a run that is not here: its trainer joins again while it lives."""
        if run in self._joined:
            return self._joined[run].service.parts
        if run in ("", self._own.run.run_name) or self.most == 1:
            return own
        raise Unavailable(
            f"run {run} has not joined the service of run {self._own.run.run_name}, or its trainer was not heard "
            f"of for {LEASE_SECONDS:g} s: see whether the trainer runs",
            reason="RUN_NOT_JOINED",
            retry_after_seconds=_REJOIN_SECONDS,
        )

    async def join(self, run: str, job_json: str, digest: str) -> float:
        """Returns the seconds of its lease; 0 for the service's own run. Raises what keeps it from joining."""
        job = _job_of(job_json)
        if self._is_own(job):
            return 0.0
        if not self._heard(run, job_json):  # at once: another run may take a while to leave
            async with self._changing:
                if run in self._joined and not self._heard(run, job_json):
                    await self._end(run, "it begins anew")
                if run not in self._joined:
                    await self._require_able(run, job, digest)
                    await self._begin(run, job, job_json)
        return LEASE_SECONDS

    async def leave(self, run: str) -> None:
        """Returns once its work has ended and its adapters are out of the engines."""
        async with self._changing:
            if run in self._joined:
                await self._end(run, "it left")

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
        async with self._changing:
            for run in [*self._joined]:
                await self._end(run, "the service stops")

    def to_protos(self, own: RolloutParts) -> Iterator[pb.Run]:
        """All of them, for GetFleet; none in a service for one run."""
        if self.most == 1:
            return
        parts = {self._own.run.run_name: own} | {name: joined.service.parts for name, joined in self._joined.items()}
        for name, of_run in parts.items():
            shares, joined = self._turns.shares, self._joined.get(name)
            yield pb.Run(
                name=name,
                policy_version=of_run.weights.policy_version,
                in_flight=shares.in_use(name),
                waiting=shares.waiting(name),
                slots=shares.slots(name),
                groups_produced=of_run.metrics.groups_produced,
                tokens_produced=of_run.metrics.tokens_produced,
                adapters=of_run.receiver.adapters.held,
                silent_seconds=_now() - joined.heard_at if joined else None,
            )

    def _heard(self, run: str, job_json: str) -> bool:
        """False where it has not joined with this job."""
        joined = self._joined.get(run)
        if joined is None or joined.job_json != job_json:
            return False
        joined.heard_at = _now()
        return True

    def _is_own(self, job: Job) -> bool:
        if job.services.buffer_address == self._own.services.buffer_address:
            return True
        name = self._own.run.run_name
        if self.most > 1 and job.run.run_name == name:
            raise AlreadyExists(f"the rollout service is that of a run {name}: join with another --run-name")
        if self.most == 1 and job.run.run_name != name:
            raise FailedPrecondition(
                f"the rollout service serves run {name} alone: start it with --rollout-runs 2 or more for run "
                f"{job.run.run_name} to join"
            )
        return self.most == 1

    async def _require_able(self, run: str, job: Job, digest: str) -> None:
        own, whose = self._own, f"the engines of run {self._own.run.run_name}"
        if len(self._joined) + 1 >= self.most:
            names = ", ".join([own.run.run_name, *self._joined])
            raise ResourceExhausted(
                f"{self.most} runs share the engines ({names}), as many as --rollout-runs says: wait until one has "
                "ended",
                retry_after_seconds=LEASE_SECONDS,
            )
        transport = job.publish.update_weight_transport
        if transport != "adapter":
            raise FailedPrecondition(
                f"run {run} has --update-weight-transport {transport} and {whose} take adapter alone: train with LoRA "
                "and that transport"
            )
        if self._digest is None:
            self._digest = await asyncio.to_thread(base_digest, own.model.hf_checkpoint)
        if digest != self._digest:
            raise FailedPrecondition(
                f"run {run} has other base weights ({job.model.hf_checkpoint}, digest {digest[:16]}) than {whose} "
                f"({own.model.hf_checkpoint}, {self._digest[:16]}): adapters are for one base"
            )
        rank, most = job.lora.lora_rank, own.lora.lora_rank
        if rank is None or most is None or rank > most:
            raise FailedPrecondition(f"run {run} has --lora-rank {rank} and {whose} take at most {most}")
        if others := set(adapted_layers(job)) - set(adapted_layers(own)):
            raise FailedPrecondition(
                f"run {run} adapts {sorted(others)}, and {whose} take adapters of {sorted(adapted_layers(own))} alone"
            )
        for name, wants, has in (
            ("use_rollout_routing_replay", job.train.use_rollout_routing_replay, own.train.use_rollout_routing_replay),
            ("colocate", job.placement.colocate, False),
            ("agent_hosts", job.rollout.agent_hosts, False),
        ):
            if wants and not has:
                raise FailedPrecondition(f"run {run} has {name}, and {whose} cannot do it for a run that joins")

    async def _begin(self, run: str, job: Job, job_json: str) -> None:
        service = self._service_of(job)
        self._joined[run] = _Joined(job_json, service, _now())
        self._divide()
        try:
            await service.start()
        except BaseException:
            del self._joined[run]
            self._divide()
            raise
        if self._watching is None:
            self._watching = asyncio.create_task(kept_running("end silent runs", self._watch, self._ended))
        log.info("run_joined", joined=run, runs=len(self._joined) + 1)

    async def _end(self, run: str, why: str) -> None:
        joined = self._joined.pop(run)
        self._divide()
        await joined.service.stop()
        log.info("run_left", left=run, why=why, runs=len(self._joined) + 1)

    def _divide(self) -> None:
        self._turns.share([self._own.run.run_name, *self._joined], self._slots)

    async def _watch(self) -> None:
        """Ends the runs whose trainers are not heard of."""
        while True:
            await asyncio.sleep(1.0)
            async with self._changing:
                silent = [name for name, run in self._joined.items() if _now() - run.heard_at > LEASE_SECONDS]
                for name in silent:
                    await self._end(name, f"its trainer was not heard of for {LEASE_SECONDS:g} s")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _job_of(text: str) -> Job:
    try:
        return Job.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise InvalidArgument(f"job_json is no job: {error}", field="job_json") from error
