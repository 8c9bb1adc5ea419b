"""A user's generate function runs for all samples that admission allows at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.hooks import HookArgs
from headrace.job.schema.job import Job
from headrace.trajectory import Status
from services.buffer.store.memory import MemoryStore
from services.rollout.build import rollout_service
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks import CustomGenerateSampler
from services.rollout.production.prompts import EncodedPrompt
from services.rollout.production.sampling import SampleRequest
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

GROUPS, SAMPLES = 32, 8
WRITTEN = """
    sample.tokens, sample.response, sample.response_length = [1, 2, 3, 4], "hi", 2
    sample.rollout_log_probs, sample.weight_versions, sample.reward = [-0.5, -0.25], ["0"], 1.0
    sample.status = sample.Status.COMPLETED
"""
WAITS = f"""
import asyncio

async def wait_for_the_others(sample):
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    await reader.read()
    writer.close(){WRITTEN}
"""
PER_SAMPLE = f"""{WAITS}
async def generate(args, sample, sampling_params):
    await wait_for_the_others(sample)
    return sample
"""
ONE_AFTER_ANOTHER = f"""{WAITS}
async def generate(args, samples, evaluation=False):
    for sample in samples:
        await wait_for_the_others(sample)
    return samples
"""


class Meeting:
    """Connections stay until `open`; `most` is how many there were at once."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.most = self._now = 0

    async def join(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        await self.open.wait()
        self._now -= 1
        writer.close()

    async def of(self, count: int) -> None:
        """Waits until as many are there."""
        while self.most < count:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def meeting() -> AsyncIterator[tuple[Meeting, int]]:
    met = Meeting()
    async with await asyncio.start_server(met.join, "127.0.0.1", 0, backlog=GROUPS * SAMPLES) as server:
        yield met, server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def producing(folder: Path, code: str, port: int, **rollout: object) -> AsyncIterator[BufferClient]:
    """A producer with the function and more prompts than one step admits; staleness is 0."""
    make_tiny_qwen3(folder)
    make_chat_tokenizer("qwen3").save_pretrained(folder)
    (folder / "hook.py").write_text(code.replace("PORT", str(port)))
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        stream = pb.StreamConfig(name="train", n_samples_per_prompt=SAMPLES, groups_per_step=GROUPS, max_staleness=0)
        await client.create_stream(stream)
        await client.submit_prompts("train", text_prompts(*(f"prompt {number}" for number in range(GROUPS + 8))))
        job = Job.model_validate(
            {
                "model": {"hf_checkpoint": folder},
                "services": {"buffer_address": server.address, "reward_address": "127.0.0.1:9"},
                "rollout": {
                    "rollout_batch_size": GROUPS,
                    "n_samples_per_prompt": SAMPLES,
                    "custom_generate_function_path": f"{folder / 'hook.py'}:generate",
                    **rollout,
                },
            }
        )
        service = rollout_service(job, lambda number: FakeEngine(WIRE), folder, CollectorRegistry())
        assert isinstance(service.parts.sampler, CustomGenerateSampler)
        await service.parts.sampler.start()
        service.parts.producer.start()
        try:
            yield client
        finally:
            await service.stop()


@pytest.mark.parametrize(
    ("code", "rollout"), [(PER_SAMPLE, {}), (ONE_AFTER_ANOTHER, {"generate_per_sample": True})], ids=["one", "list"]
)
async def test_256_samples_of_a_step_are_in_flight_at_once(
    tmp_path: Path, code: str, rollout: dict[str, object]
) -> None:
    async with asyncio.timeout(120), meeting() as (met, port), producing(tmp_path, code, port, **rollout) as client:
        await met.of(GROUPS * SAMPLES)
        met.open.set()
        while (await client.stats("train")).groups["READY"] < GROUPS:
            await asyncio.sleep(0.05)
    assert met.most == GROUPS * SAMPLES


async def test_max_groups_in_flight_bounds_what_users_functions_do_at_once(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(120),
        meeting() as (met, port),
        producing(tmp_path, PER_SAMPLE, port, max_groups_in_flight=2) as client,
    ):
        await met.of(2 * SAMPLES)
        met.open.set()
        while (await client.stats("train")).groups["READY"] < GROUPS:
            await asyncio.sleep(0.05)
    assert met.most == 2 * SAMPLES


@pytest.mark.parametrize("hangs", ["await asyncio.Event().wait()", "time.sleep(1e6)"], ids=["waits", "blocks"])
async def test_a_function_that_hangs_for_one_sample_fails_that_sample_alone(tmp_path: Path, hangs: str) -> None:
    code = f"""
import asyncio, time

async def generate(args, sample, sampling_params):
    if sample.index == 3:
        {hangs}
    await asyncio.sleep(0.01){WRITTEN}    return sample
"""
    (tmp_path / "hook.py").write_text(code)
    path = f"{tmp_path / 'hook.py'}:generate"
    sampler = CustomGenerateSampler(
        path, HookArgs({"reward_key": None}), ServedWeights(), seconds=4.0, calls_at_once=SAMPLES
    )
    try:
        await sampler.start()
        samples = await sampler.sample_all([request(index) for index in range(SAMPLES)], evaluation=False)
    finally:
        await sampler.close()
    failures = {sample.index: sample.failure.reason for sample in samples if sample.failure}
    assert failures == {3: "HOOK_TIMEOUT"}
    assert [sample.status for sample in samples].count(Status.COMPLETED) == SAMPLES - 1


def request(index: int) -> SampleRequest:
    prompt = EncodedPrompt("hello", (1, 2))
    return SampleRequest(f"g/1/{index}", "g", index, prompt, "7", {}, SamplingParams(max_new_tokens=4))
