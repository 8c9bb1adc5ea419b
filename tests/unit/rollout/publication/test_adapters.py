"""Publications of adapters into fake engines: beside what is served, one version a request, and every way to fail."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import ChecksumMismatch, FailedPrecondition, HeadraceError, PublicationAborted
from headrace.publication import Probe, TensorSpec
from services.rollout.engine.arguments import MOST_ADAPTERS
from services.rollout.engine.fleet import EngineState
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from tests.support.fakes.fake_fleet import FakeFleet
from tests.unit.rollout.publication.test_receiver import PLAN

FILE = "adapter_model.safetensors"


def write_adapter(root: Path, version: int, *, name: str | None = None) -> tuple[Plan, Mapping[str, str]]:
    """The plan of a publication whose folder is there, and the checksums that it is to have."""
    name = name or f"e1-v{version}-0a1b2c3d"
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    save_file({"lora_A": np.frombuffer(f"version {version}".encode(), np.uint8)}, folder / FILE)
    plan = replace(
        PLAN,
        publication_id=name,
        policy_version=version,
        buckets={0: [TensorSpec("lora_A", (8, 2), "float32")]},
        groups=(),
        folder=folder,
        is_adapter=True,
    )
    return plan, {FILE: hashlib.sha256((folder / FILE).read_bytes()).hexdigest()}


@pytest.fixture
def receiver(fakes: FakeFleet, tmp_path: Path) -> Receiver:
    return Receiver(fakes.fleet, tmp_path)


async def publish(receiver: Receiver, plan: Plan, checksums: Mapping[str, str], probe: Probe | None = None) -> None:
    await receiver.begin(plan)
    await receiver.receive(plan.publication_id, 0)
    await receiver.commit(plan.publication_id, checksums, probe)


async def test_no_engine_stands_still_and_the_former_adapter_leaves(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    for version in (1, 2):
        await publish(receiver, *write_adapter(tmp_path, version))
    assert fakes.fleet.policy_version == 2
    assert fakes.fleet.weights.adapter == "e1-v2-0a1b2c3d"
    for number in (0, 1):
        fake = fakes.fake(number)
        await fakes.until(lambda fake=fake: list(fake.adapters) == ["e1-v2-0a1b2c3d"])  # type: ignore[misc]
        assert fake.adapters["e1-v2-0a1b2c3d"] == {"lora_A": "version 2"}
        assert "/pause_generation" not in fake.calls
    assert [engine.state for engine in fakes.fleet.engines] == [EngineState.READY] * 2


async def test_a_request_keeps_the_adapter_that_it_began_with(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    await publish(receiver, *write_adapter(tmp_path, 1))
    with fakes.fleet.weights.using_adapter() as adapter:
        await publish(receiver, *write_adapter(tmp_path, 2))
        assert adapter in fakes.fake(0).adapters
        assert "/unload_lora_adapter" not in fakes.fake(0).calls
        assert await fakes.fleet.weights.version_of(adapter) == 1
    await fakes.until(lambda: adapter not in fakes.fake(0).adapters)
    assert await fakes.fleet.weights.version_of(adapter) == 1, "its tokens may be told of later"


async def test_a_publication_waits_until_there_is_room_for_another_adapter(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    in_use = []
    for version in range(1, MOST_ADAPTERS + 1):
        await publish(receiver, *write_adapter(tmp_path, version))
        in_use.append(fakes.fleet.weights.using_adapter())
        in_use[-1].__enter__()
    assert len(receiver.adapters.held) == MOST_ADAPTERS
    publishing = asyncio.create_task(publish(receiver, *write_adapter(tmp_path, 9)))
    await asyncio.sleep(0)
    assert fakes.fleet.policy_version == MOST_ADAPTERS
    in_use.pop(0).__exit__(None, None, None)
    await publishing
    assert fakes.fleet.policy_version == 9
    for each in in_use:
        each.__exit__(None, None, None)


async def test_another_file_than_was_sent_is_not_served(fakes: FakeFleet, receiver: Receiver, tmp_path: Path) -> None:
    await publish(receiver, *write_adapter(tmp_path, 1))
    plan, checksums = write_adapter(tmp_path, 2)
    with pytest.raises(ChecksumMismatch):
        await publish(receiver, plan, dict.fromkeys(checksums, "0" * 64))
    await fakes.until(lambda: all(list(fakes.fake(n).adapters) == ["e1-v1-0a1b2c3d"] for n in (0, 1)))
    assert fakes.fleet.weights.adapter == "e1-v1-0a1b2c3d"
    assert [(engine.state, engine.restarts) for engine in fakes.fleet.engines] == [(EngineState.READY, 0)] * 2


async def test_it_is_probed_before_a_request_may_use_it(fakes: FakeFleet, receiver: Receiver, tmp_path: Path) -> None:
    plan, checksums = write_adapter(tmp_path, 1)
    right = Probe((1, 2), (-0.3,), 0.01)
    await publish(receiver, plan, checksums, right)
    assert [body["lora_path"] for body in fakes.fake(0).bodies] == [plan.publication_id]
    plan, checksums = write_adapter(tmp_path, 2)
    with pytest.raises(HeadraceError):
        await publish(receiver, plan, checksums, replace(right, log_probs=(-5.0,)))
    assert fakes.fleet.weights.adapter == "e1-v1-0a1b2c3d"


async def test_an_engine_that_came_back_loads_the_served_adapter(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    plan, checksums = write_adapter(tmp_path, 1)
    await publish(receiver, plan, checksums)
    fakes.fake(1).die()
    await fakes.until(lambda: fakes.fleet.engines[1].restarts == 1)
    await fakes.until(lambda: fakes.fleet.engines[1].state is EngineState.READY)
    assert list(fakes.fake(1).adapters) == [plan.publication_id], "as requests name it"


async def test_an_engine_that_came_back_is_given_the_served_adapter_again_where_its_folder_is_gone(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    plan, checksums = write_adapter(tmp_path, 1)
    await publish(receiver, plan, checksums)
    assert plan.folder is not None
    hidden = plan.folder.rename(tmp_path / "hidden")
    fakes.fake(1).die()
    await fakes.until(lambda: fakes.fleet.engines[1].state is EngineState.STALE)
    hidden.rename(plan.folder)
    again = replace(plan, publication_id="e1-v1-again", engine_ids=("engine-1",))
    await publish(receiver, again, checksums)
    assert list(fakes.fake(1).adapters) == [plan.publication_id], "as requests name it"
    assert fakes.fake(0).calls.count("/load_lora_adapter") == 1
    assert [engine.state for engine in fakes.fleet.engines] == [EngineState.READY] * 2


@pytest.mark.parametrize("fault", ["refuse", "hang", "die"])
async def test_engines_that_cannot_load_it_go_on_with_the_former_one(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path, fault: str
) -> None:
    await publish(receiver, *write_adapter(tmp_path, 1))
    for number in (0, 1):
        fakes.fake(number).faults["/load_lora_adapter"] = fault  # type: ignore[assignment]
    plan, checksums = write_adapter(tmp_path, 2)
    with pytest.raises(PublicationAborted):
        await publish(receiver, replace(plan, deadline_seconds=1.5), checksums)
    assert fakes.fleet.policy_version == 1
    if fault == "refuse":
        await fakes.until(lambda: [e.state for e in fakes.fleet.engines] == [EngineState.READY] * 2)
        assert [engine.restarts for engine in fakes.fleet.engines] == [0, 0]
    else:  # they are started again, and load it
        await fakes.until(lambda: [e.restarts for e in fakes.fleet.engines] == [1, 1])
        await fakes.until(lambda: [e.state for e in fakes.fleet.engines] == [EngineState.READY] * 2)
    assert receiver.adapters.held == ("e1-v1-0a1b2c3d",)


async def test_a_folder_without_an_adapter_is_loaded_by_no_engine(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    plan, _ = write_adapter(tmp_path, 1)
    assert plan.folder is not None
    (plan.folder / "adapter_config.json").unlink()
    await receiver.begin(plan)
    with pytest.raises(FailedPrecondition):
        await receiver.receive(plan.publication_id, 0)
    assert "/load_lora_adapter" not in fakes.fake(0).calls


async def test_at_the_end_of_the_service_nothing_waits_for_requests(
    fakes: FakeFleet, receiver: Receiver, tmp_path: Path
) -> None:
    await publish(receiver, *write_adapter(tmp_path, 1))
    with fakes.fleet.weights.using_adapter():
        await publish(receiver, *write_adapter(tmp_path, 2))
        with suppress(HeadraceError):
            await receiver.close()
        assert receiver.adapters.held == ("e1-v2-0a1b2c3d",)
