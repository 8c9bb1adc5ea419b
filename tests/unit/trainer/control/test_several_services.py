"""Publications to several rollout services: one that is away, dies, hangs or refuses is left behind and comes back.

A real publisher and real receivers, over engines without a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import Fenced, InvalidArgument, Unavailable
from headrace.job.schema.run import PublishSection
from headrace.publication import Probe
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.server import engine_to_proto
from services.trainer.control import publication
from services.trainer.control import transport as transport_module
from services.trainer.control.channel import Channel
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import RankGroup
from services.trainer.control.transport import transport_of
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.state import ALL_STALE, NONE_STALE, StaleEngines, TrainState
from tests.long_forms import ALL
from tests.support.fakes.fake_fleet import FakeFleet, RememberedRouting
from tests.unit.trainer.control.test_rollback import (
    ROLLBACK,
    DirectRollout,
    Model,
    Strike,
    StruckEngine,
    Worker,
    weights_of,
)

CALLS = ("get_fleet", "begin_publish", "publish_bucket", "commit_publish")
FLEETS_REFUSE_NOTHING = ("get_fleet", "refuses")
TRANSPORTS = ("collective", "disk")


@dataclass
class Trouble:
    """What a service does from one of its calls on, until it is mended."""

    call: str = ""
    kind: str = ""
    began: bool = False

    async def passes(self, call: str) -> None:
        self.began = self.began or call == self.call
        if not self.began:
            return
        if self.kind == "hangs":
            await asyncio.Event().wait()
        if self.kind == "dies":
            raise Unavailable("the connection was refused")
        if call == self.call:
            raise InvalidArgument("told to refuse")


class TroubledRollout(DirectRollout):
    """A rollout service with one engine; a mended one has started again."""

    def __init__(self, model: Model) -> None:
        self.trouble = Trouble()
        self.mixtures: set[str] = set()
        self.routing, self.strike = RememberedRouting(), Strike("", "refuses")
        self.fleet = Fleet(
            1,
            1,
            lambda number: StruckEngine(number, self.strike, model.wire, self.mixtures),
            self.routing,
            FleetTiming(start_seconds=60, check_interval_seconds=0.01, check_timeout_seconds=1.0, max_restarts=1000),
        )
        super().__init__(FakeFleet(self.fleet, self.routing), model, self.strike)

    @property
    def engine(self) -> StruckEngine:
        process = self.fleet.engines[0].process
        assert isinstance(process, StruckEngine)
        return process

    async def until(self, *states: EngineState) -> None:
        await self._fakes.until(lambda: self.fleet.engines[0].state in states)

    async def get_fleet(self, **_: float) -> pb.GetFleetResponse:
        await self.trouble.passes("get_fleet")
        return pb.GetFleetResponse(
            engines=map(engine_to_proto, self.fleet.engines),
            policy_version=self.fleet.policy_version,
            publication_id=self.receiver.open_id,
        )

    async def begin_publish(self, request: pb.BeginPublishRequest, **_: float) -> pb.BeginPublishResponse:
        await self.trouble.passes("begin_publish")
        return await super().begin_publish(request)

    async def publish_bucket(self, publication_id: str, bucket: int, **_: float) -> None:
        await self.trouble.passes("publish_bucket")
        await super().publish_bucket(publication_id, bucket)

    async def commit_publish(
        self, publication_id: str, checksums: Mapping[str, str], *, probe: Probe, **_: float
    ) -> pb.CommitPublishResponse:
        await self.trouble.passes("commit_publish")
        return await super().commit_publish(publication_id, checksums, probe=probe)

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        await self.trouble.passes("abort_publish")
        await super().abort_publish(publication_id, reason)


@dataclass
class Run:
    """Rank 0 and its rollout services."""

    model: Model
    services: list[TroubledRollout]
    publisher: Publisher

    async def publish(self, version: int) -> dict[str, float]:
        self.model.version = version
        return await self.publisher.publish(TrainState(step=version, policy_version=version - 1, epoch=1))

    async def stale_engines(self, version: int) -> StaleEngines:
        return await self.publisher.stale_engines(TrainState(step=version, policy_version=version, epoch=1))

    async def rejoined(self, version: int) -> None:
        state = TrainState(step=version, policy_version=version, epoch=1)
        await self.publisher.rejoin(state, (await self.publisher.stale_engines(state)).engine_ids)

    def serve(self, *versions: int) -> bool:
        """Whether the services serve these versions, and their engines hold them."""
        return all(
            service.fleet.policy_version == version
            and service.fleet.engines[0].state is EngineState.READY
            and (service.engine.weights or weights_of(0)) == weights_of(version)
            for service, version in zip(self.services, versions, strict=True)
        )


@asynccontextmanager
async def a_run(folder: Path, transport: str = "collective", num_services: int = 2) -> AsyncIterator[Run]:
    config = PublishSection.model_validate(
        {"update_weight_transport": transport, "update_weight_timeout_seconds": 20.0, **ROLLBACK.get(transport, {})}
    )
    model = Model(root=None if transport == "collective" else folder)
    channel = Channel(0, 1, b"")
    ranks: RankGroup[Any] = RankGroup(channel, Worker(model), ThreadPoolExecutor(1))
    services = [TroubledRollout(model) for _ in range(num_services)]
    clients = [cast(RolloutClient, service) for service in services]
    devices = OwnDevices()
    way = transport_of(config, ranks, folder, hashes=False, devices=devices)
    publisher = Publisher(ranks, clients, way, config, backend="gloo", away_seconds=0.0, devices=devices)
    await asyncio.gather(*(service.fleet.start() for service in services))
    try:
        yield Run(model, services, publisher)
    finally:
        await asyncio.gather(*(service.fleet.stop() for service in services))
        await channel.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience with one that hangs: far less than the publication's own time."""
    monkeypatch.setattr(transport_module, "STRAGGLER_SECONDS", 0.5)
    monkeypatch.setattr(publication, "_PRESENT_SECONDS", 0.5)
    monkeypatch.setattr(publication, "_ABSENT_SECONDS", 0.2)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_weights_are_gathered_once_for_all_services(transport: str, tmp_path: Path) -> None:
    async with a_run(tmp_path, transport, num_services=3) as run:
        figures = await run.publish(1)
        assert run.serve(1, 1, 1)
        assert run.model.num_sent == 1
        assert (figures["publish/services"], figures["publish/services_left"]) == (3.0, 0.0)
        assert figures["publish/engines"] == 3.0
        assert await run.stale_engines(1) == NONE_STALE


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (call, kind)
        for call in CALLS
        for kind in ("dies", "hangs", "refuses")
        if (call, kind) != FLEETS_REFUSE_NOTHING and (ALL or kind != "hangs" or call == "publish_bucket")
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS if ALL else TRANSPORTS[:1])
async def test_a_service_that_fails_is_left_behind_and_is_given_the_served_weights_when_it_is_back(
    transport: str, call: str, kind: str, tmp_path: Path
) -> None:
    async with a_run(tmp_path, transport) as run:
        await run.publish(1)
        well, troubled = run.services
        troubled.trouble = Trouble(call, kind)
        figures = await run.publish(2)
        assert (figures["publish/services"], figures["publish/services_left"]) == (1.0, 1.0)
        assert (well.fleet.policy_version, troubled.fleet.policy_version) == (2, 1)
        assert troubled.routing.urls <= {troubled.fleet.engines[0].url}

        calls = list(well.engine.calls)
        troubled.trouble = Trouble()
        await troubled.receiver.close()  # as its deadline would
        await troubled.until(EngineState.READY, EngineState.STALE)
        assert await run.stale_engines(2) == StaleEngines(engine_ids={1: ()})
        await run.rejoined(2)
        assert run.serve(2, 2)
        assert "/pause_generation" not in well.engine.calls[len(calls) :], "the other one does not notice"
        assert await run.stale_engines(2) == NONE_STALE
        assert (await run.publish(3))["publish/services_left"] == 0.0
        assert run.serve(3, 3)


async def test_a_service_at_which_a_newer_trainer_has_begun_ends_this_one_and_its_publication(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        await run.publish(1)
        run.services[1].receiver.fence.check(2)
        with pytest.raises(Fenced):
            await run.publish(2)
        assert run.serve(1, 1)
        assert run.services[0].receiver.open_id == ""


async def test_services_that_all_serve_another_version_are_all_given_this_one(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        assert await run.stale_engines(1) == ALL_STALE
        run.services[0].trouble = Trouble("get_fleet", "dies")
        assert await run.stale_engines(1) == ALL_STALE, "of those that answer"
        await run.publish(1)
        assert await run.stale_engines(1) == NONE_STALE
        run.services[1].trouble = Trouble("get_fleet", "dies")
        await run.stale_engines(1)
        with pytest.raises(Unavailable, match="nor any call"):
            await run.stale_engines(1)
