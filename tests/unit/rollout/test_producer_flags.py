"""Flags of production act on the producer that is built of a job, before a real buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.rollout.v1.rollout_pb2 import GetFleetRequest
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.recorded_steps import sample_ids_of
from headrace.trajectory import Sample
from services.buffer.store.memory import MemoryStore
from services.rollout import fleet_build
from services.rollout.build import rollout_service
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState
from services.rollout.production.producer import Producer
from services.rollout.server import RolloutServicer
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, FakeFleet, RememberedRouting
from tests.support.fakes.scripted_reward import score, scripted_reward
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


LONG = 60
"""Tokens of a response. The engine has no end of its own."""


class NoRouter(RememberedRouting):
    """Stands where sglang-router does, before one engine: those who ask it ask the engine."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def stop(self) -> None:
        pass


@asynccontextmanager
async def generating(
    sections: Mapping[str, Mapping[str, Any]], *, policy_version: int = 0, token_seconds: float = 0.0
) -> AsyncIterator[tuple[Producer, FakeFleet]]:
    """The job's service at work before an engine of this policy version, which needs so long for each token."""
    engine = FakeEngine(WIRE, token_seconds=token_seconds)
    job = Job.model_validate(sections)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_build, "Router", lambda *_, **__: NoRouter(engine.url))
        service = rollout_service(job, lambda number: engine, job.model.hf_checkpoint, CollectorRegistry())
    parts = service.parts
    fakes = FakeFleet(parts.fleet, RememberedRouting(), [engine])
    await parts.fleet.start()
    await fakes.until(lambda: parts.fleet.engines[0].state is EngineState.READY)
    await fakes.name_weights(0, policy_version)
    parts.fleet.weights.policy_version = policy_version
    parts.producer.start()
    try:
        yield parts.producer, fakes
    finally:
        await service.stop()


@asynccontextmanager
async def one_group(folder: Path, **sections: Mapping[str, Any]) -> AsyncIterator[tuple[BufferClient, dict[str, Any]]]:
    """A buffer that wants one group of two samples, and the job of its producers."""
    make_tiny_qwen3(folder)
    config = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=1, max_staleness=5)
    async with (
        served_buffer(MemoryStore()) as (_, server),
        BufferClient(server.address) as client,
        scripted_reward(score(1.0)) as reward,
    ):
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts("it"))
        yield (
            client,
            {
                "model": {"hf_checkpoint": folder},
                "services": {"buffer_address": server.address, "reward_address": reward.address},
                "buffer": {"max_staleness": 5},
            }
            | {"rollout": {"rollout_max_response_len": LONG, **sections.pop("rollout", {})}, **sections},
        )


async def samples_of(client: BufferClient, epoch: int) -> list[Sample]:
    """Those of the group, once they are there."""
    async with asyncio.timeout(60):
        while not (batch := await client.try_lease_batch("train", epoch, 0, wait_seconds=1.0)).ready:
            pass
    return [Sample.unpack(packed) for packed in await client.fetch_samples("train", sample_ids_of(batch))]


@pytest.mark.parametrize(("partial_rollout", "mask"), [(False, False), (True, False), (True, True)])
async def test_partial_rollout_continues_an_interrupted_group_and_the_mask_leaves_its_older_tokens_out(
    tmp_path: Path, partial_rollout: bool, mask: bool
) -> None:
    flags = {"partial_rollout": partial_rollout, "mask_offpolicy_in_partial_rollout": mask}
    async with one_group(tmp_path, rollout=flags) as (client, sections):
        epoch = (await client.rewind("train", 0)).epoch
        async with generating(sections, token_seconds=0.01) as (producer, fakes):
            await fakes.until(lambda: fakes.fake(0).num_tokens >= 9)
            await producer.drain()
        await client.set_policy_version("train", epoch, 3)
        async with generating(sections, policy_version=3) as (_, fakes):
            samples = await samples_of(client, epoch)
            made = fakes.fake(0).num_tokens
    begun = [sum(r.end - r.start for r in sample.policy_ranges if r.policy_version == 0) for sample in samples]
    assert all(0 < length < LONG for length in begun) if partial_rollout else begun == [0, 0]
    assert made == 2 * LONG - sum(begun)
    trained = [int(sample.loss_mask.sum()) for sample in samples]
    assert trained == ([LONG - length for length in begun] if mask else [LONG, LONG])


@pytest.mark.parametrize("is_taught", [False, True])
async def test_every_token_has_the_log_prob_of_the_teacher_at_opd_teacher_url(tmp_path: Path, is_taught: bool) -> None:
    teacher = FakeEngine(WIRE)
    await teacher.start(seconds=60)
    url = {"opd_teacher_url": teacher.url} if is_taught else {}
    try:
        async with one_group(tmp_path, distillation=url) as (client, sections):
            epoch = (await client.rewind("train", 0)).epoch
            async with generating(sections), EngineClient(teacher.url) as asked:
                for sample in await samples_of(client, epoch):
                    expected = await asked.score(sample.tokens.tolist(), cache_key="", seconds=60.0)
                    said = sample.columns.get("teacher_log_probs")
                    assert (said is not None) == is_taught
                    if said is not None:
                        np.testing.assert_allclose(said, expected[-LONG:], rtol=1e-6)
    finally:
        await teacher.stop()
