"""A rollout function at work: it leases from a real buffer, and what it returns is stored there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.trajectory import Sample
from services.buffer.store.memory import MemoryStore
from services.rollout.build import rollout_service
from services.rollout.rollout_function import StepSampler
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

GROUPS, SAMPLES, PROMPTS = 3, 2, 12
WRITES = """
import asyncio, copy, os
from headrace.hooks import Sample
from headrace.hooks.rollout import RolloutFnTrainOutput

def write(sample, reward=1.0):
    sample.tokens, sample.response, sample.response_length = [1, 2, 3, 4], "hi", 2
    sample.rollout_log_probs, sample.loss_mask, sample.reward = [-0.5, -0.25], None, reward
    sample.status = Sample.Status.COMPLETED
    return sample

def written(group, reward=1.0):
    return [write(sample, reward) for sample in group]
"""
SYNC = f"""{WRITES}
def generate_rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.over_sampling_batch_size)
    for group in groups:
        group[0].metadata["called"] = [rollout_id, len(groups), args.rollout_batch_size, evaluation]
    return RolloutFnTrainOutput(samples=[written(group) for group in groups], metrics={{"seen": 3}})
"""


class Producing:
    def __init__(self, buffer: BufferClient, sampler: StepSampler) -> None:
        self.buffer = buffer
        self.sampler = sampler

    async def batch(self) -> list[Sample]:
        """The samples of the first step, once it is full."""
        epoch = (await self.buffer.rewind("train", 0)).epoch
        reply = await self.buffer.lease_batch("train", epoch, 0, timeout_seconds=120)
        names = [envelope.sample_id for group in reply.groups for envelope in group.samples]
        return [Sample.unpack(packed) for packed in await self.buffer.fetch_samples("train", names)]

    async def groups(self, state: str, count: int) -> pb.StreamStats:
        async with asyncio.timeout(60):
            while (stats := await self.buffer.stats("train")).groups[state] < count:
                await asyncio.sleep(0.02)  # another party's state
        return stats


@contextlib.asynccontextmanager
async def producing(folder: Path, code: str, *, spare: int = 0, **rollout: Any) -> AsyncIterator[Producing]:
    (folder / "hook.py").write_text(code)
    make_tiny_qwen3(folder)
    make_chat_tokenizer("qwen3").save_pretrained(folder)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        config = pb.StreamConfig(name="train", n_samples_per_prompt=SAMPLES, groups_per_step=GROUPS, max_staleness=0)
        config.over_sampling_groups, config.max_attempts = spare, 1
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts(*(f"prompt {number}" for number in range(PROMPTS))))
        own = {"rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES}
        options = {"rollout_function_path": f"{folder / 'hook.py'}:generate_rollout", **own, **rollout}
        job = Job.model_validate(
            {
                "model": {"hf_checkpoint": folder},
                "services": {"buffer_address": server.address, "reward_address": "127.0.0.1:9"},
                "rollout": options,
            }
        )
        service = rollout_service(job, lambda number: FakeEngine(WIRE), folder, CollectorRegistry())
        sampler = service.parts.sampler
        assert isinstance(sampler, StepSampler)
        try:
            for hook in service._custom:
                await hook.start()
            service.parts.producer.start()
            yield Producing(client, sampler)
        finally:
            await service.stop()
