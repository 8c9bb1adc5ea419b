"""Supervised fine-tuning asks no engine and no scorer: none is started, and conversations are put all the same."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import FailedPrecondition
from headrace.job.rules.scope import services_here
from headrace.job.schema.job import Job
from headrace.process.linux import descendants
from services.buffer.store.memory import MemoryStore
from services.rollout.build import rollout_service
from services.rollout.server import RolloutServicer
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

NUM_PROMPTS = 5
SFT = ("--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--num-steps-per-rollout", "1", "--loss-mask-type")


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ((*SFT, "qwen3"), ["buffer", "rollout", "trainer"]),
        ((*SFT, "qwen", "--eval-prompt-data", "sums", "EVAL"), ["buffer", "reward", "rollout", "trainer"]),
        ((*SFT, "qwen", "--openai-port", "8000"), ["buffer", "reward", "rollout", "trainer"]),
        ((), ["buffer", "reward", "rollout", "trainer"]),
    ],
)
def test_a_reward_service_is_started_where_something_is_scored(
    load_with: Any, tmp_path: Path, flags: tuple[str, ...], started: list[str]
) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    flags = tuple(str(tmp_path / "eval.jsonl") if flag == "EVAL" else flag for flag in flags)
    assert list(services_here(load_with(*flags))) == started


def conversation(number: int) -> sample_pb2.Prompt:
    said = [("user", f"say {number}"), ("assistant", f"number {number}")]
    messages = [sample_pb2.ChatMessage(role=role, content=content) for role, content in said]
    return sample_pb2.Prompt(prompt_id=f"c{number}", messages=sample_pb2.ChatMessages(messages=messages))


async def test_conversations_become_groups_of_the_trainers_version_without_an_engine_or_a_router(
    tmp_path: Path,
) -> None:
    make_tiny_qwen3(tmp_path)
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        config = buffer_pb2.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=NUM_PROMPTS)
        await client.create_stream(config)
        await client.submit_prompts("train", [conversation(number) for number in range(NUM_PROMPTS)])
        epoch = (await client.rewind("train", 0)).epoch
        await client.set_policy_version("train", epoch, 3)
        sections = {
            "model": {"hf_checkpoint": tmp_path},
            "services": {"buffer_address": server.address},
            "train": {"loss_type": "sft_loss", "loss_mask_type": "qwen3"},
            "rollout": {"n_samples_per_prompt": 1, "rollout_batch_size": NUM_PROMPTS},
        }

        def no_engine(number: int) -> FakeEngine:
            raise AssertionError(f"engine {number} was asked for")

        service = rollout_service(Job.model_validate(sections), no_engine, tmp_path, CollectorRegistry())
        await service.start()
        try:
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
            assert not [command for command in commands if b"router_process" in command]
            async with asyncio.timeout(60):
                while (await client.stats("train")).groups["READY"] < NUM_PROMPTS:  # another party's state
                    await asyncio.sleep(0.02)
            servicer, context = RolloutServicer(service.parts), cast(Any, None)
            with pytest.raises(FailedPrecondition, match="--eval-prompt-data NAME PATH to have some"):
                await servicer.BeginPublish(pb.BeginPublishRequest(publication_id="p"), context)
            shown = await servicer.GetFleet(pb.GetFleetRequest(), context)
            assert (list(shown.engines), shown.router_address, shown.reward_address) == ([], "", "")
        finally:
            await service.stop()
