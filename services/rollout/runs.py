"""Several runs on one service's engines: each has adapters, producers, a scorer and a ledger of its own.

  JoinRun ──► joined ──(LeaveRun, or no JoinRun for LEASE_SECONDS)──► leaving ──► gone
A run's part is what a service for it alone would be, without engines. All parts wait for their turn at the engines:
each has an even share of the slots, and borrows what others leave free. The run that the service was started for is
always there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import pydantic

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from headrace.job.schema.job import Job
from headrace.models.folders import base_digest
from headrace.rpc.log import kept_running, log
from services.rollout.admission import EngineSlots
from services.rollout.engine.weights import ServedWeights
from services.rollout.fleet_build import adapted_layers
from services.rollout.metrics import RolloutMetrics
from services.rollout.publication.receiver import Receiver

LEASE_SECONDS = 15.0
_REJOIN_SECONDS = 2.0


class OfRun(Protocol):
    """The parts of a run that are shown of it."""

    @property
    def weights(self) -> ServedWeights:
        """What it is served."""

    @property
    def metrics(self) -> RolloutMetrics:
        """What it has produced."""

    @property
    def receiver(self) -> Receiver:
        """Of its publications."""


Parts = TypeVar("Parts", bound=OfRun)


class Part(Protocol[Parts]):
    """A service for one run on engines that are there."""

    parts: Parts

    async def start(self) -> None:
        """Raises ConfigError, as for a function that cannot be loaded here."""

    async def stop(self) -> None:
        """Returns its leases, and takes its adapters out of the engines."""


@dataclass
class _Joined(Generic[Parts]):
    job_json: str
    part: Part[Parts]
    heard_at: float


class Runs(Generic[Parts]):
    """The runs beside the service's own."""

    def __init__(
        self,
        own: Job,
        part_of: Callable[[Job], Part[Parts]],
        turns: EngineSlots,
        slots: int,
        ended: Callable[[str], None],
    ) -> None:
        """`slots`: the requests that all runs together have at the engines while several have some.

        `ended` is told of background work that broke off.
        """
        self._own = own
        self._part_of = part_of
        self._turns = turns
        self._ended = ended
        self._slots = slots
        self._joined: dict[str, _Joined[Parts]] = {}
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._digest: str | None = None

    @property
    def most(self) -> int:
        """How many there may be with the service's own."""
        return self._own.services.rollout_runs

    def parts_of(self, run: str, own: Parts) -> Parts:
        """Raises Unavailable for a run that is not here: its trainer joins again while it lives."""
        if run in self._joined:
            return self._joined[run].part.parts
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
        """Returns once nothing of it is left."""
        async with self._changing:
            if run in self._joined:
                await self._end(run, "it left")

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
        async with self._changing:
            for run in [*self._joined]:
                await self._end(run, "the service stops")

    def to_protos(self, own: Parts) -> Iterator[pb.Run]:
        """All of them, for GetFleet; none in a service for one run."""
        if self.most == 1:
            return
        parts = {self._own.run.run_name: own} | {name: joined.part.parts for name, joined in self._joined.items()}
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
        part = self._part_of(job)
        self._joined[run] = _Joined(job_json, part, _now())
        self._divide()
        try:
            await part.start()
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
        await joined.part.stop()
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
