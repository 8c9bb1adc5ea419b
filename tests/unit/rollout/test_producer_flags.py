"""Flags of production act on the producer that is built of a job, before a real buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.rollout.v1.rollout_pb2 import GetFleetRequest
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from services.buffer.store.memory import MemoryStore
from services.rollout.build import rollout_service
from services.rollout.engine.engine import EngineState
from services.rollout.servicer import RolloutServicer
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

NUM_PROMPTS = 6


@asynccontextmanager
async def producing(folder: Path, **rollout: int) -> AsyncIterator[BufferClient]:
    """A producer at work whose router is away, so that no group is ever ready."""
    make_tiny_qwen3(folder)
    make_chat_tokenizer("qwen3").save_pretrained(folder)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=NUM_PROMPTS))
        await client.submit_prompts("train", text_prompts(*(f"prompt {number}" for number in range(NUM_PROMPTS))))
        addresses = {"buffer_address": server.address, "reward_address": "127.0.0.1:9"}
        sections = {"model": {"hf_checkpoint": folder}, "services": addresses, "rollout": rollout}
        job = Job.model_validate(sections)
        service = rollout_service(job, lambda number: FakeEngine(WIRE), folder, CollectorRegistry())
        service.parts.producer.start()
        try:
            yield client
        finally:
            await service.stop()


async def test_a_prompt_longer_than_rollout_max_prompt_len_is_dropped(tmp_path: Path) -> None:
    async with producing(tmp_path, rollout_max_prompt_len=1) as client, asyncio.timeout(60):
        while (stats := await client.stats("train")).groups["DROPPED"] < NUM_PROMPTS:
            await asyncio.sleep(0.05)
    assert "rollout_max_prompt_len is 1" in stats.production.failures[0].example


async def test_max_groups_in_flight_is_how_many_groups_are_leased_at_once(tmp_path: Path) -> None:
    async with producing(tmp_path, max_groups_in_flight=3) as client, asyncio.timeout(60):
        while (await client.stats("train")).groups["LEASED"] < 3:
            await asyncio.sleep(0.05)
        for _ in range(20):  # a producer without the limit would take the others at once
            assert (await client.stats("train")).groups["LEASED"] == 3
            await asyncio.sleep(0.05)


async def test_adapt_groups_in_flight_follows_the_engines_and_the_fleet_shows_it(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path)
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": tmp_path},
            "services": {"buffer_address": "127.0.0.1:9", "reward_address": "127.0.0.1:9"},
            "rollout": {"max_groups_in_flight": 8, "n_samples_per_prompt": 2, "adapt_groups_in_flight": True},
        }
    )
    registry = CollectorRegistry()
    service = rollout_service(job, lambda number: FakeEngine(WIRE), tmp_path, registry)
    fleet, producer = service.parts.fleet, service.parts.producer
    engine = fleet.engines[0]
    await engine.occupy(FakeEngine(WIRE))
    fake = engine.process
    assert isinstance(fake, FakeEngine)
    await fake.start(seconds=60)
    engine.state = EngineState.READY
    fake.cache_usage = 1.0
    watch = service.load_watch
    assert watch is not None
    try:
        producer._groups = {str(number): cast(Any, None) for number in range(4)}
        for _ in range(3):
            await watch.look()
        assert producer.max_groups_in_flight == 3
        assert registry.get_sample_value("headrace_rollout_max_groups_in_flight") == 3
        shown = await RolloutServicer(service.parts).GetFleet(GetFleetRequest(), cast(Any, None))
        assert (shown.groups_in_flight, shown.max_groups_in_flight) == (4, 3)
        assert [(one.kind, one.slots) for one in shown.requests] == [("training", 6), ("evaluation", 2), ("clients", 2)]
    finally:
        producer._groups = {}
        await service.stop()
    fixed = job.model_copy(update={"rollout": job.rollout.model_copy(update={"adapt_groups_in_flight": False})})
    service = rollout_service(fixed, lambda number: FakeEngine(WIRE), tmp_path, CollectorRegistry())
    assert service.load_watch is None
    await service.stop()
