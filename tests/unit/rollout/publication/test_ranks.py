"""Every rank of an engine joins every group of the sender's stages, on however many machines the engine is.

Parts of attention (--sglang-dp-size) divide requests, not weights: their ranks join as any others.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from headrace.errors import ChecksumMismatch
from headrace.job.engine_shape import EngineShape
from headrace.publication import TensorSpec
from services.rollout.engine.fleet import EngineSlot, Fleet, FleetTiming
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.weights.weight_group import WeightGroup
from tests.support.fakes.engine_checksums import engine_checksums, flat_bytes
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.gloo_engine import GlooEngine

SHAPES = (EngineShape(4, nodes=2), EngineShape(1), EngineShape(4, nodes=2), EngineShape(2, dp_size=2))
STAGES = ("model.layers.0.w", "model.layers.1.w")
"""Of a trainer with two pipeline stages: each sends its own tensor in its own group."""


@dataclass
class Engines:
    fleet: Fleet
    fakes: list[GlooEngine]
    receiver: Receiver


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    fakes = [GlooEngine(num_ranks=shape.devices) for shape in SHAPES]
    slots = lambda number: EngineSlot(SHAPES[number])  # noqa: E731
    fleet = Fleet(len(fakes), slots, fakes.__getitem__, RememberedRouting(), FleetTiming(start_seconds=60))
    await fleet.start()
    yield Engines(fleet, fakes, Receiver(fleet))
    await fleet.stop()


async def sent(engines: Engines, weights: Mapping[str, torch.Tensor]) -> str:
    """Broadcasts each stage's tensor to all ranks, and returns the publication that is to be committed."""
    groups = [WeightGroup(f"stage-{name}-{uuid.uuid4().hex}", "127.0.0.1", "gloo", 60.0) for name in STAGES]
    plan = Plan(
        publication_id=uuid.uuid4().hex,
        epoch=1,
        policy_version=1,
        pause_mode="in_place",
        backend="gloo",
        deadline_seconds=60,
        buckets={n: [TensorSpec(name, tuple(weights[name].shape), "float32")] for n, name in enumerate(STAGES)},
        groups=[GroupPlan(group.name, "127.0.0.1", group.port, (n,)) for n, group in enumerate(groups)],
    )
    begun = await engines.receiver.begin(plan)
    assert begun.world_size == 1 + 4 + 1 + 4 + 2
    await asyncio.gather(*(asyncio.to_thread(group.join, begun.world_size, lambda: False) for group in groups))
    for number, (name, group) in enumerate(zip(STAGES, groups, strict=True)):
        receiving = asyncio.create_task(engines.receiver.receive(plan.publication_id, number))
        await asyncio.to_thread(group.broadcast, flat_bytes(weights[name]), lambda: False)
        await receiving
    return plan.publication_id


async def test_each_rank_receives_what_each_stage_sends(engines: Engines) -> None:
    weights = {name: torch.randn(3, 5) for name in STAGES}
    publication = await sent(engines, weights)
    committed = await engines.receiver.commit(publication, engine_checksums(weights))
    assert committed.engine_ids == ("engine-0", "engine-1", "engine-2", "engine-3")
    for fake in engines.fakes:
        for tensors in fake.of_ranks:
            assert all(torch.equal(tensors[name], weights[name]) for name in STAGES)


@pytest.mark.parametrize("sender_knows", [True, False])
async def test_one_rank_on_another_machine_that_holds_something_else_is_found(
    engines: Engines, sender_knows: bool
) -> None:
    """By the sender's checksums, or by those of the engine that cuts the weights in the same way."""
    weights = {name: torch.randn(3, 5) for name in STAGES}
    publication = await sent(engines, weights)
    engines.fakes[2].of_ranks[3][STAGES[1]][0, 0] += 1
    if sender_knows:
        committed = await engines.receiver.commit(publication, engine_checksums(weights))
        assert committed.lost_engine_ids == ("engine-2",)
    else:
        with pytest.raises(ChecksumMismatch, match="engines differ from each other"):
            await engines.receiver.commit(publication, {})
