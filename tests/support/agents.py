"""A rollout service with an agent, before fake engines or real ones, and a ledger."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.rpc.server import Listen
from headrace.trajectory import Sample
from services.buffer.store.memory import MemoryStore
from services.rollout.agents.sampler import AgentSampler
from services.rollout.build import rollout_service
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.process import EngineFactory
from services.rollout.production.sampling import SampleRequest
from services.rollout.service import RolloutService
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import without_router
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

GROUPS, SAMPLES = 3, 4
LOOPBACK = Listen("127.0.0.1:0")
AGENT = """
import asyncio
import openai


async def run(args, task, base_url):
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        messages = [{"role": "user", "content": task.prompt}]
        for turn in range(2):
            made = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": made.choices[0].message.content})
            messages.append({"role": "user", "content": "are you sure?"})
        return float(len(messages))
"""


@dataclass
class Producing:
    service: RolloutService
    buffer: BufferClient
    buffer_address: str

    @property
    def sampler(self) -> AgentSampler:
        assert isinstance(self.service.parts.sampler, AgentSampler)
        return self.service.parts.sampler

    async def play(self, count: int = 1, *, metadata: Mapping[str, object] | None = None) -> list[Sample]:
        """The samples of one group, without the ledger."""
        prompt = self.service.parts.encoder.encode_text("2 + 2?")
        params = SamplingParams(max_new_tokens=6, seed=5)
        requests = [SampleRequest(f"g/1/{i}", "g", i, prompt, "4", metadata or {}, params) for i in range(count)]
        return await self.sampler.sample_all(requests, evaluation=False)

    async def produced(self) -> list[Sample]:
        """All samples of the ledger, once every group is ready."""
        async with asyncio.timeout(240):
            while (await self.buffer.stats("train")).groups["READY"] < GROUPS:
                await asyncio.sleep(0.05)
        groups = (await self.buffer.list_groups("train")).groups
        ids = [sample.sample_id for group in groups for sample in group.samples]
        return [Sample.unpack(each) for each in await self.buffer.fetch_samples("train", ids)]


def require_as_sampled(sample: Sample) -> None:
    """Each trained stretch is what the engine says after all tokens before it."""
    tokens, start = sample.tokens.tolist(), sample.prompt_length
    mask = np.concatenate([np.zeros(start, dtype=np.uint8), sample.loss_mask])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        assert tokens[begin:end] == response_to(tokens[:begin], end - begin)


@contextlib.asynccontextmanager
async def producing(
    folder: Path,
    code: str,
    factory: Callable[[Job], EngineFactory],
    *,
    num_prompts: int = GROUPS,
    listen: Listen = LOOPBACK,
    **rollout: object,
) -> AsyncIterator[Producing]:
    make_tiny_qwen3(folder)
    make_chat_tokenizer("qwen2.5").save_pretrained(folder)
    (folder / "agent.py").write_text(code)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(pb.StreamConfig(name="train", n_samples_per_prompt=SAMPLES, groups_per_step=GROUPS))
        if num_prompts:
            await client.submit_prompts("train", text_prompts(*(f"prompt {n}" for n in range(num_prompts))))
        job = Job.model_validate(
            {
                "model": {"hf_checkpoint": folder},
                "services": {"buffer_address": server.address, "reward_address": "127.0.0.1:9"},
                "rollout": {
                    "rollout_batch_size": GROUPS,
                    "n_samples_per_prompt": SAMPLES,
                    "rollout_max_response_len": 6,
                    "agent_function_path": f"{folder / 'agent.py'}:run",
                    **rollout,
                },
            }
        )
        build = factory(job)
        engine = build(0)
        first = iter([engine])
        with without_router(engine) if isinstance(engine, FakeEngine) else contextlib.nullcontext():
            service = rollout_service(
                job, lambda number: next(first, None) or build(number), folder, CollectorRegistry(), listen=listen
            )
        await service.start()
        try:
            yield Producing(service, client, server.address)
        finally:
            await service.stop()
