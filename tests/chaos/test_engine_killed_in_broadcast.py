"""An engine is gone in the middle of a broadcast of weights: killed with a part of a bucket, or stopped before it.

Engines are processes of their own that take part in real gloo groups; only the model is missing in them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headrace.errors import PublicationAborted
from headrace.publication import TensorSpec
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.weights.weight_group import WeightGroup
from tests.long_forms import whole_run
from tests.support.fakes.engine_checksums import engine_checksums, flat_bytes
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.gloo_engine import GlooEngineProcess

MEGABYTES = 48  # of a bucket: far more than sockets hold


@dataclass
class Processes:
    """Two engines; the second has a failpoint in its first process, and its next one waits for `may_return`."""

    folder: Path
    failpoint: str
    routing: RememberedRouting = field(default_factory=RememberedRouting)
    may_return: asyncio.Event = field(default_factory=asyncio.Event)
    started: list[GlooEngineProcess] = field(default_factory=list)

    def build(self, number: int) -> GlooEngineProcess:
        log = self.folder / f"engine-{len(self.started)}.log"
        if len(self.started) < 2:
            self.started.append(GlooEngineProcess(log, self.failpoint if number else ""))
        else:
            self.started.append(GlooEngineProcess(log, may_start=self.may_return))
        return self.started[-1]

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        fleet = Fleet(2, 1, self.build, self.routing, FleetTiming(start_seconds=120, check_interval_seconds=0.05))
        await fleet.start()
        try:
            yield fleet
        finally:
            self.may_return.set()
            await fleet.stop()


# Killed, the kernel tells everybody at once; stopped, only the deadline does.
@pytest.mark.parametrize(
    ("failpoint", "deadline_seconds"), [("bytes:kill:2", 60.0), pytest.param("bucket:stop:2", 10.0, marks=whole_run)]
)
async def test_a_version_is_not_served_by_half_and_the_others_go_on(
    tmp_path: Path, failpoint: str, deadline_seconds: float
) -> None:
    processes = Processes(tmp_path, failpoint)  # each publication has one bucket: it strikes in the second one
    async with processes.fleet() as fleet:
        receiver = Receiver(fleet)
        survivor, victim = fleet.engines
        group = a_group("first")
        old, new = weights(1), weights(2)
        await publish(receiver, group, old, 1)
        url_of_the_survivor = survivor.url

        with pytest.raises(PublicationAborted):
            await publish(receiver, group, new, 2, deadline_seconds=deadline_seconds)
        await receiver.abort("version-2", "as the trainer does")
        assert fleet.policy_version == 1
        assert processes.routing.urls == set(), "nobody serves a mixture"
        assert (survivor.state, survivor.restarts, survivor.url) == (EngineState.STALE, 0, url_of_the_survivor)
        assert victim.state is not EngineState.READY

        again = await publish(receiver, a_group("second"), new, 2, name="version-2-again")
        assert again.engine_ids == (survivor.engine_id,)
        assert processes.routing.urls == {url_of_the_survivor}

        processes.may_return.set()
        async with asyncio.timeout(120):
            while victim.state is not EngineState.STALE:  # another party's state
                await asyncio.sleep(0.05)
        assert victim.restarts == 1
        await publish(receiver, a_group("third"), new, 2, name="version-2-alone", engine_ids=(victim.engine_id,))
        assert [e.state for e in fleet.engines] == [EngineState.READY] * 2
        assert {e.weights_digest for e in fleet.engines} == {again.weights_digest}
        both = await publish(receiver, a_group("fourth"), weights(3), 3)
        assert both.engine_ids == (survivor.engine_id, victim.engine_id)


@pytest.mark.parametrize("call", ["pause_generation", pytest.param("begin_weight_update", marks=whole_run)])
async def test_one_that_is_killed_before_the_bucket_does_not_take_the_others_with_it(tmp_path: Path, call: str) -> None:
    """The sender sees it first, while the survivor is only about to receive from a sender that is gone."""
    processes = Processes(tmp_path, f"{call}:kill:2")
    async with processes.fleet() as fleet:
        receiver, group = Receiver(fleet), a_group("first")
        survivor, _ = fleet.engines
        await publish(receiver, group, weights(1), 1)
        with pytest.raises(PublicationAborted):
            await publish(receiver, group, weights(2), 2)
        async with asyncio.timeout(60):
            await receiver.abort("version-2", "as the trainer does")
        assert survivor.restarts == 0

        again = await publish(receiver, a_group("second"), weights(2), 2, name="version-2-again")
        assert again.engine_ids == (survivor.engine_id,)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """One tensor, large enough to be in the middle of."""
    random = torch.Generator().manual_seed(seed)
    return {"model.norm.weight": torch.rand(MEGABYTES << 18, generator=random)}


def a_group(name: str) -> WeightGroup:
    return WeightGroup(f"{name}-{uuid.uuid4().hex}", "127.0.0.1", "gloo", 60.0)


async def publish(
    receiver: Receiver,
    group: WeightGroup,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    *,
    name: str = "",
    deadline_seconds: float = 60.0,
    engine_ids: tuple[str, ...] = (),
) -> CommitResult:
    """One bucket, sent as the trainer's ranks send it; the first failure of either side ends both."""
    plan = Plan(
        publication_id=name or f"version-{version}",
        epoch=1,
        policy_version=version,
        pause_mode="in_place",
        backend="gloo",
        deadline_seconds=deadline_seconds,
        buckets={0: [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]},
        groups=[GroupPlan(group.name, "127.0.0.1", group.port, (0,), joined=group.joined)],
        engine_ids=engine_ids,
    )
    begun = await receiver.begin(plan)
    given_up = asyncio.Event()

    def send() -> None:
        if not group.joined:
            group.join(begun.world_size, given_up.is_set)
        group.broadcast(torch.cat([flat_bytes(tensor) for tensor in tensors.values()]), given_up.is_set)

    sending = asyncio.create_task(asyncio.to_thread(send))
    receiving = asyncio.create_task(receiver.receive(plan.publication_id, 0))
    done, _ = await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_EXCEPTION)
    if failures := [error for task in done if (error := task.exception())]:
        given_up.set()
        async with asyncio.timeout(60):  # it does not hang
            await asyncio.gather(sending, return_exceptions=True)  # it may have been through when the engine went
        group.drop()
        receiving.cancel()
        raise PublicationAborted(f"as the trainer says it: {failures[0]}") from failures[0]
    return await receiver.commit(plan.publication_id, engine_checksums(tensors))
