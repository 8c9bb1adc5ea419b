"""What holds for a publication on every way that weights may come, and what holds for files alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument, PublicationAborted
from services.rollout.engine.fleet import EngineState
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from tests.support.fake_weights import write_version
from tests.support.fakes.fake_fleet import WIRE, FakeFleet
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN, send

Planned = Callable[..., Plan]


@pytest.fixture(params=["collective", "disk"])
def planned(request: pytest.FixtureRequest, tmp_path: Path) -> Planned:
    """Makes the plan of a publication whose weights are ready; `wrong` ones are not those of CHECKSUMS."""

    def collective(name: str, version: int, *, wrong: bool = False, epoch: int = 1, **changes: Any) -> Plan:
        groups = [GroupPlan(name, "127.0.0.1", 1, (0, 1))]
        plan = replace(PLAN, publication_id=name, policy_version=version, epoch=epoch, groups=groups)
        return replace(plan, **changes)

    def disk(name: str, version: int, *, wrong: bool = False, epoch: int = 1, **changes: Any) -> Plan:
        write_version(tmp_path / name, WIRE | ({"b": "bad b"} if wrong else {}))
        plan = collective(name, version, epoch=epoch, **changes)
        return replace(plan, groups=(), buckets={0: [*PLAN.buckets[0], *PLAN.buckets[1]]}, folder=tmp_path / name)

    return collective if request.param == "collective" else disk


async def through(receiver: Receiver, plan: Plan) -> tuple[str, ...]:
    await send(receiver, plan)
    return (await receiver.commit(plan.publication_id, CHECKSUMS)).engine_ids


@pytest.mark.parametrize("pause_mode", ["in_place", "retract", "abort"])
async def test_a_version_is_served_by_all_however_requests_wait_for_it(
    fakes: FakeFleet, planned: Planned, tmp_path: Path, pause_mode: str
) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    for version in (1, 2):
        assert await through(receiver, planned(f"p{version}", version, pause_mode=pause_mode)) == (
            "engine-0",
            "engine-1",
        )
        assert fakes.fleet.policy_version == version
    for number in (0, 1):
        assert fakes.fake(number).weights == WIRE
        calls = fakes.fake(number).calls
        paused, resumed = calls.index("/pause_generation"), calls.index("/continue_generation")
        loaded = [n for n, call in enumerate(calls) if call.startswith("/update_weights_from")]
        assert paused < loaded[0] < calls.index("/flush_cache", loaded[0]) < resumed


async def test_weights_that_are_not_what_was_sent_are_not_served(
    fakes: FakeFleet, planned: Planned, tmp_path: Path
) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    plan = planned("p1", 1, wrong=True)
    await send(receiver, plan)
    for number in (0, 1):
        fakes.fake(number).weights["b"] = "bad b"
    with pytest.raises(ChecksumMismatch, match="first b: sent"):
        await receiver.commit("p1", CHECKSUMS)
    assert fakes.fleet.policy_version == 0
    await fakes.until(lambda: [e.restarts for e in fakes.fleet.engines] == [1, 1])


async def test_an_engine_that_came_back_rejoins_alone(fakes: FakeFleet, planned: Planned, tmp_path: Path) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    await through(receiver, planned("p1", 1))
    fakes.fake(1).die()
    await fakes.until(lambda: fakes.fleet.engines[1].state is EngineState.STALE)
    paused = fakes.fake(0).calls.count("/pause_generation")
    assert await through(receiver, planned("p2", 1, engine_ids=("engine-1",))) == ("engine-1",)
    assert [e.state for e in fakes.fleet.engines] == [EngineState.READY] * 2
    assert fakes.fake(0).calls.count("/pause_generation") == paused
    assert fakes.fake(1).weights == WIRE
    assert fakes.fake(1).groups == set()
    assert fakes.routing.urls == {engine.url for engine in fakes.fleet.engines}


async def test_a_hung_engine_ends_a_publication_at_its_deadline(
    fakes: FakeFleet, planned: Planned, tmp_path: Path
) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    for number in (0, 1):
        for call in ("/update_weights_from_distributed", "/update_weights_from_disk"):
            fakes.fake(number).faults[call] = "hang"
    await receiver.begin(planned("p1", 1, deadline_seconds=1.5))  # long enough to prepare beside anything
    with pytest.raises(PublicationAborted):
        await receiver.receive("p1", 0)
    await fakes.until(lambda: [(e.state, e.restarts) for e in fakes.fleet.engines] == [(EngineState.READY, 1)] * 2)
    assert await through(receiver, planned("p2", 1))


@pytest.mark.parametrize("planned", ["disk"], indirect=True)
async def test_a_folder_that_is_not_whole_is_loaded_by_no_engine(
    fakes: FakeFleet, planned: Planned, tmp_path: Path
) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    plan = planned("p1", 1)
    file = tmp_path / "p1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    await receiver.begin(plan)
    with pytest.raises(FailedPrecondition, match="is not a whole folder of weights on the rollout service's machine"):
        await receiver.receive("p1", 0)
    await receiver.abort("p1", "the trainer heard of it")
    assert [(e.state, e.restarts) for e in fakes.fleet.engines] == [(EngineState.READY, 0)] * 2
    for number in (0, 1):
        assert "/pause_generation" not in fakes.fake(number).calls, "requests do not even stand still"
    assert await through(receiver, planned("p2", 1))


@pytest.mark.parametrize("planned", ["disk"], indirect=True)
@pytest.mark.parametrize("way", ["above", "link", "nowhere"])
async def test_a_folder_outside_of_the_operators_is_not_loaded(
    fakes: FakeFleet, planned: Planned, tmp_path: Path, way: str
) -> None:
    plan = planned("p1", 1)
    root = tmp_path / "weights"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "p1")
    named = {"above": root / ".." / "p1", "link": root / "link"}
    receiver = Receiver(fakes.fleet, None if way == "nowhere" else root)
    await receiver.begin(replace(plan, folder=named.get(way, root / "p1")))
    with pytest.raises(InvalidArgument, match=r"is not below .*--update-weight-disk-path|was given no folder"):
        await receiver.receive("p1", 0)
    assert all("/update_weights_from_disk" not in fakes.fake(number).calls for number in (0, 1))


async def test_when_all_engines_refuse_the_weights_none_is_started_again_though_nobody_aborts_it(
    fakes: FakeFleet, planned: Planned, tmp_path: Path
) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    for number in (0, 1):
        for call in ("/update_weights_from_distributed", "/update_weights_from_disk"):
            fakes.fake(number).faults[call] = "refuse"
    await receiver.begin(planned("p1", 1))
    with pytest.raises(PublicationAborted, match="every engine refused: .*told to"):
        await receiver.receive("p1", 0)
    await fakes.until(lambda: [(e.state, e.restarts) for e in fakes.fleet.engines] == [(EngineState.STALE, 0)] * 2)


async def test_an_engines_draft_model_keeps_its_own_weights_of_the_same_names(fakes: FakeFleet, tmp_path: Path) -> None:
    receiver = Receiver(fakes.fleet, tmp_path)
    plan = replace(PLAN, publication_id="p1", policy_version=1, groups=[GroupPlan("p1", "127.0.0.1", 1, (0, 1))])
    assert await through(receiver, plan) == ("engine-0", "engine-1")
    assert [fakes.fake(number).weights for number in (0, 1)] == [WIRE, WIRE]
    assert [fakes.fake(number).sent_to_draft for number in (0, 1)] == [[], []]
