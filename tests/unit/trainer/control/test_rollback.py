"""Publications that fail, at every point: engines serve a whole version again, the old one if the new cannot be had.

Those through files: which folders are there when, who loads them, and what becomes of bad ones.
A real publisher and a real receiver, over engines that fail at one call. What is on the wire says its version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from aiohttp import web

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import HeadraceError, Unavailable
from headrace.job.schema.job import Job
from headrace.publication import Probe, TensorSpec
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.production.generator import Generator
from services.rollout.publication.plan import plan_from_proto
from services.rollout.publication.receiver import Receiver
from services.trainer.control.channel import Channel
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import RankGroup
from services.trainer.control.senders import Compared, Probed, Sent, StageGroup, StageWeights
from services.trainer.control.transport import sweep, transport_of
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.state import TrainState
from tests.long_forms import ALL
from tests.support.fake_weights import DELTA, delta, fake_checksum, write_version
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import FakeFleet, RememberedRouting
from tests.support.fakes.hostile_engine import TakingTurns
from tests.support.fakes.idle_worker import IdleWorker

_NAMES = "pause_generation update_weight_version flush_cache continue_generation weights_checker generate"
OF_BOTH = tuple(f"/{name}" for name in _NAMES.split())
CALLS = {
    "collective": (
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        *OF_BOTH,
    ),
    **dict.fromkeys(("disk", "ipc"), ("/update_weights_from_disk", *OF_BOTH)),
}
CALLS |= {f"{name} delta": CALLS[name] for name in ("collective", "disk")}
OF_ONE = ("/update_weights_from_distributed", "/update_weights_from_disk", "/weights_checker")
POINTS = [
    (name, call)
    for name, calls in CALLS.items()
    for call in calls
    if ALL or name == "collective" or call in OF_ONE  # else as collective
]
ROLLBACK = {"collective": {"update_weight_rollback": "host"}}
When = Literal["refuses", "before", "during", "after"]
NAMES = ("a", "b", "c")


def weights_of(version: int) -> dict[str, str]:
    """The last one changes every second time."""
    return {"a": f"a of {version}", "b": f"b of {version}", "c": f"c of {version // 2}"}


@dataclass
class Model:
    """What the trainer has, what it keeps, and what is on the wire, or in a folder below `root`."""

    root: Path | None = None
    version: int = 0
    kept: int = 0
    is_sending: bool = False
    wire: dict[str, str] = field(default_factory=lambda: weights_of(0))
    num_groups: int = 0
    num_sent: int = 0
    num_deltas: int = 0


class Worker(IdleWorker):
    """The only rank; `spoil` is called with each folder that it has written."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spoil: Callable[[Path], None] = lambda folder: None

    def probe(self) -> Probed:
        return Probed([5, 6, 7], [-0.7 - self._model.version, -0.1 - self._model.version])

    def describe_weights(self) -> StageWeights:
        return StageWeights(0, [[TensorSpec(name, (1,), "float32")] for name in NAMES])

    def open_group(self, service: int) -> StageGroup:
        self._model.is_sending = False
        self._model.num_groups += 1
        return StageGroup(0, f"g{self._model.num_groups}", "127.0.0.1", 1, joined=False)

    def send_weights(self, publication_id: str, world_sizes: Mapping[int, int], kept: bool = False) -> Sent:
        model = self._model
        if not (kept and model.root):
            model.num_sent += 1
            model.wire.pop(DELTA, None)
            model.wire.update(weights_of(model.kept if kept else model.version))
            model.is_sending = True
            if model.root is not None:
                write_version(model.root / publication_id, model.wire)
        sent = Sent(0, {name: fake_checksum(model.wire[name]) for name in NAMES})
        if model.root is not None:
            self.spoil(model.root / publication_id)
        return sent

    def compare_weights(self) -> Compared:
        return Compared(0, 100, 10)

    def send_delta(self, publication_id: str, world_sizes: Mapping[int, int]) -> Sent:
        model, weights = self._model, weights_of(self._model.version)
        model.num_deltas += 1
        model.wire.update(delta(weights, weights_of(model.kept)))
        model.is_sending = True
        if model.root is not None:
            write_version(model.root / publication_id, {DELTA: model.wire[DELTA]})
            model.wire.update(weights)  # what senders say of it later
            self.spoil(model.root / publication_id)
        return Sent(0, {name: fake_checksum(content) for name, content in weights.items()})

    def keep_weights(self) -> None:
        self._model.kept = self._model.version


@dataclass
class Strike:
    """Which engines fail, where, and with which version."""

    call: str
    when: When
    engines: frozenset[int] = frozenset()
    policy_version: int | None = None
    published: int | None = None
    """The version that is being published."""

    def falls_on(self, engine: int, path: str) -> bool:
        return path == self.call and engine in self.engines and self.policy_version == self.published


class StruckEngine(FakeEngine):
    """Remembers names under which it said tokens with other weights than the name's version."""

    mixtures: set[str]

    def __init__(self, number: int, strike: Strike, wire: Mapping[str, str], mixtures: set[str]) -> None:
        super().__init__(wire, token_seconds=0.001)
        self.mixtures = mixtures
        self._number = number
        self._strike = strike

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":  # its probes alone are a call of the publication
            return await super()._answer(request)
        return await self._struck(request.path, lambda: super(StruckEngine, self)._answer(request))

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "logprob_start_len" not in body:
            return await super()._generate(request, body)
        return await self._struck("/generate", lambda: super(StruckEngine, self)._generate(request, body))

    async def _struck(self, path: str, act: Callable[[], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        is_start = path == "/update_weight_version" and not self.weights  # its initial weights are named, too
        if is_start or not self._strike.falls_on(self._number, path):
            return await act()
        if self._strike.when == "refuses":
            return web.json_response({"success": False, "message": "told to"}, status=400)
        if self._strike.when == "before":
            self.die()
            return web.Response(status=503)
        answer = await act()
        if self._strike.when == "during":
            self.die()
        else:
            asyncio.get_running_loop().call_later(0.005, self.die)
        return answer

    def _score(self, tokens: Sequence[int]) -> list[tuple[float, int, None]]:
        version = int(self.weights["a"].split()[-1]) if self.weights else 0
        return [(log_prob - version, token, None) for log_prob, token, _ in super()._score(tokens)]

    def _next_token(self, context: Sequence[int]) -> int:
        version = int(self._version.split(".")[0])
        if self.weights != (weights_of(version) if version or self.weights else {}):
            self.mixtures.add(self._version)
        return super()._next_token(context)


class DirectRollout:
    """A rollout service without a wire; `begin_publish` waits for an engine, as a client does."""

    def __init__(self, fakes: FakeFleet, model: Model, strike: Strike) -> None:
        self.receiver = Receiver(fakes.fleet, model.root)
        self._fakes = fakes
        self._model = model
        self._strike = strike

    async def begin_publish(self, request: pb.BeginPublishRequest, **_: float) -> pb.BeginPublishResponse:
        self._strike.published = request.policy_version
        while True:
            await self._fakes.until(lambda: bool(self._fakes.fleet.alive()))
            try:
                begun = await self.receiver.begin(plan_from_proto(request))
            except Unavailable:
                continue
            return pb.BeginPublishResponse(world_size=begun.world_size, engine_ids=begun.engine_ids)

    async def publish_bucket(self, publication_id: str, bucket: int, **_: float) -> None:
        await self._fakes.until(lambda: self._model.is_sending)
        await self.receiver.receive(publication_id, bucket)

    async def commit_publish(
        self, publication_id: str, checksums: Mapping[str, str], *, probe: Probe, **_: float
    ) -> pb.CommitPublishResponse:
        committed = await self.receiver.commit(publication_id, checksums, probe)
        return pb.CommitPublishResponse(
            engine_ids=committed.engine_ids,
            lost_engine_ids=committed.lost_engine_ids,
            weights_digest=committed.weights_digest,
        )

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        await self.receiver.abort(publication_id, reason)


class Run:
    """Two engines, a trainer, and requests that never stop."""

    def __init__(self, call: str, when: When, transport: str, root: Path) -> None:
        way, sends_deltas = transport.removesuffix(" delta"), transport.endswith("delta")
        self.strike, self.model = Strike(call, when), Model(root=None if way == "collective" else root)
        self.mixtures: set[str] = set()
        self.routing = RememberedRouting()
        self.fleet = Fleet(
            2,
            1,
            lambda number: StruckEngine(number, self.strike, self.model.wire, self.mixtures),
            self.routing,
            FleetTiming(start_seconds=60, check_interval_seconds=0.01, check_timeout_seconds=1.0, max_restarts=1000),
        )
        self.fakes = FakeFleet(self.fleet, self.routing)
        self.router = TakingTurns(self.routing)
        publish = {"update_weight_transport": way, "update_weight_delta": sends_deltas, **ROLLBACK.get(transport, {})}
        services = {"rollout_address": "127.0.0.1:1"}
        job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services, "publish": publish})
        rollout = cast(RolloutClient, DirectRollout(self.fakes, self.model, self.strike))
        self.channel = Channel(0, 1, b"")
        self.worker = Worker(self.model)
        ranks: RankGroup[Any] = RankGroup(self.channel, self.worker, ThreadPoolExecutor(1))
        devices = OwnDevices()
        carrier = transport_of(job.publish, ranks, root, hashes=False, devices=devices)
        self.publisher = Publisher(
            ranks, [rollout], carrier, job.publish, backend="gloo", away_seconds=60.0, devices=devices
        )

    async def __aenter__(self) -> Run:
        await self.fleet.start()
        self._asking = [asyncio.create_task(self._ask(number)) for number in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self.router.close()
        await self.fleet.stop()
        await self.channel.close()

    async def _ask(self, number: int) -> None:
        generator, asked = Generator(self.router, self.fleet.weights), 0
        while True:
            asked += 1
            await generator.generate(
                (5, 6, 7), SamplingParams(max_new_tokens=30), request_id=f"{number}-{asked}", seconds=60
            )

    async def publish(self, version: int, *, failing: frozenset[int]) -> bool:
        """False where the version could not be had."""
        self.model.version = version
        self.strike.engines, self.strike.policy_version = failing, version
        try:
            await self.publisher.publish(TrainState(step=version, policy_version=0, epoch=1))
        except HeadraceError:
            return False
        return True

    async def serves(self, version: int) -> None:
        """Returns when an engine serves all of the version; one that died after its last call gets it again."""
        self.strike.engines = frozenset()
        await self.fakes.until(
            lambda: all(e.state in (EngineState.READY, EngineState.STALE) for e in self.fleet.engines)
        )
        ready = [engine for engine in self.fleet.engines if engine.state is EngineState.READY]
        if not ready and self.model.version == version:
            stale = [engine.engine_id for engine in self.fleet.engines]
            await self.publisher.rejoin(TrainState(step=version, policy_version=version, epoch=1), {0: stale})
            ready = [engine for engine in self.fleet.engines if engine.state is EngineState.READY]
        assert self.fleet.policy_version == version
        assert ready, "nobody serves"
        for engine in ready:
            assert self.fakes.fake(engine.number).weights == weights_of(version)
        assert self.routing.urls == {engine.url for engine in ready}


@pytest.mark.parametrize("when", ["refuses", "before", "during", "after"])
@pytest.mark.parametrize(("transport", "call"), POINTS)
async def test_engines_serve_a_whole_version_again_wherever_a_publication_failed(
    transport: str, call: str, when: When, tmp_path: Path
) -> None:
    async with Run(call, when, transport, tmp_path) as run:
        assert await run.publish(1, failing=frozenset())
        await run.serves(1)
        served = 1
        for version, failing in ((2, {0}), (3, {1}), (4, {0, 1})):
            if await run.publish(version, failing=frozenset(failing)):
                served = version
            await run.serves(served)
        assert await run.publish(5, failing=frozenset())
        await run.serves(5)
        assert [await run.fleet.weights.version_of(name) for name in run.mixtures] == [None] * len(run.mixtures)


NOBODY: frozenset[int] = frozenset()


@pytest.mark.parametrize("way", ["collective", "disk"])
async def test_what_changed_is_sent_to_engines_that_have_the_rest_and_the_whole_to_others(
    way: str, tmp_path: Path
) -> None:
    async with Run("nothing", "refuses", f"{way} delta", tmp_path) as run:
        for version in (1, 2, 3):
            assert await run.publish(version, failing=NOBODY)
            await run.serves(version)
        assert (run.model.num_sent, run.model.num_deltas) == (1, 2)
        await lost(run, 1)
        await run.publisher.rejoin(TrainState(step=3, policy_version=3, epoch=1), {0: ["engine-1"]})
        assert run.fakes.fake(1).weights == weights_of(3)
        assert run.model.num_sent == (2 if way == "collective" else 1), "a folder of the whole lies there already"
        await lost(run, 1)
        assert await run.publish(4, failing=NOBODY)
        await run.serves(4)
        assert run.model.num_deltas == 3, "one engine without the base is no reason to send all to the others"
        await lost(run, 0)
        await run.fakes.until(lambda: run.fleet.engines[1].state in (EngineState.READY, EngineState.STALE))
        if run.fleet.engines[1].state is EngineState.READY:
            await lost(run, 1)
        assert await run.publish(5, failing=NOBODY)
        await run.serves(5)
        assert (run.model.num_sent, run.model.num_deltas) == ((3, 3) if way == "collective" else (1, 4))


async def test_a_delta_that_arrives_otherwise_is_not_served_and_the_whole_follows(tmp_path: Path) -> None:
    async with Run("nothing", "refuses", "disk delta", tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        run.worker.spoil = lambda folder: cut(folder) if run.model.num_deltas == run.model.num_sent else None
        assert await run.publish(2, failing=NOBODY)
        await run.serves(2)
        assert (run.model.num_sent, run.model.num_deltas) == (2, 1)
        assert folders(tmp_path) == ["v2"]


async def test_no_more_than_the_whole_lies_under_a_delta(tmp_path: Path) -> None:
    async with Run("nothing", "refuses", "disk delta", tmp_path) as run:
        for version in range(1, 13):
            assert await run.publish(version, failing=NOBODY)
            await run.serves(version)
        assert (run.model.num_sent, run.model.num_deltas) == (2, 10)
        assert folders(tmp_path) == ["v12"]


def a_run(root: Path) -> Run:
    return Run("nothing", "refuses", "disk", root)


def folders(root: Path) -> list[str]:
    """The versions that lie there."""
    return sorted(path.name.split("-")[1] for path in root.iterdir())


def flip_a_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


async def test_a_wrong_byte_in_a_file_is_not_served_and_engines_load_the_version_before(tmp_path: Path) -> None:
    for spoil in (flip_a_byte, cut):
        root = tmp_path / spoil.__name__
        root.mkdir()
        async with a_run(root) as run:
            assert await run.publish(1, failing=NOBODY)
            run.worker.spoil = spoil
            assert not await run.publish(2, failing=NOBODY)
            await run.serves(1)
            assert folders(root) == ["v1"], "what failed fills no disk"
            run.worker.spoil = lambda folder: None
            assert await run.publish(3, failing=NOBODY)
            await run.serves(3)
            assert folders(root) == ["v3"], "only the served version stays"
            assert [await run.fleet.weights.version_of(name) for name in run.mixtures] == [None] * len(run.mixtures)


async def test_an_engine_that_came_back_loads_the_served_folder_and_nothing_is_written(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 1
        assert run.fakes.fake(1).weights == weights_of(1)
        assert [engine.state for engine in run.fleet.engines] == [EngineState.READY] * 2


async def test_a_served_folder_that_went_bad_is_written_again(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        flip_a_byte(next(tmp_path.iterdir()))
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 1
        assert run.fleet.engines[1].state is not EngineState.READY
        await run.fakes.until(lambda: run.fleet.engines[1].state is EngineState.STALE)
        await rejoin(run)
        assert run.fleet.engines[1].state is EngineState.READY
        assert folders(tmp_path) == ["v1"]
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 2, "what was written again is the served folder now"
        assert run.fleet.engines[1].state is EngineState.READY


async def lost(run: Run, number: int) -> None:
    run.fakes.fake(number).die()
    await run.fakes.until(lambda: run.fleet.engines[number].state is EngineState.STALE)


async def rejoin(run: Run) -> None:
    await run.publisher.rejoin(TrainState(step=1, policy_version=1, epoch=1), {0: ["engine-1"]})


async def test_a_trainer_makes_room_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "e0-v9-0a1b2c3d").mkdir()
    (tmp_path / ".e0-v9-1a1b2c3d.draft").mkdir()
    seen: list[int] = []
    async with a_run(tmp_path) as run:
        run.worker.spoil = lambda folder: seen.append(len(list(tmp_path.iterdir())))
        assert await run.publish(1, failing=NOBODY)
    assert seen == [1]


def test_what_older_trainers_left_is_deleted_and_in_a_shared_folder_what_this_run_noted_alone(tmp_path: Path) -> None:
    own, others = ["e1-v3-0a1b2c3d", ".e1-v4-0a1b2c3d.draft", "e2-v1-1a1b2c3d", "e2-v2-2a1b2c3d"], ["e1-v3-0000aaaa"]
    kept = ["e3-v1-0a1b2c3d", "mine", "e1-v3-notmine!", ".e2.segments"]
    written, root = tmp_path / "written-weights.jsonl", tmp_path / "shared"
    noted = [name.strip(".").removesuffix(".draft") for name in own]
    written.write_text("".join(json.dumps({"publication_id": name}) + "\n" for name in noted) + '{"publication_')
    for name in (*own, *others, *kept, ".e1.segments"):
        (root / name).mkdir(parents=True)
    sweep(root, {own[3]}, 2, written)
    assert sorted(path.name for path in root.iterdir()) == sorted([own[3], *others, *kept])
    sweep(root, set(), 2)
    assert sorted(path.name for path in root.iterdir()) == sorted(kept)
    sweep(tmp_path / "not there yet", set(), 2)
