"""A real SGLang engine is given adapters that peft wrote, beside requests that go on, and computes what peft does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from headrace.job.schema.job import Job
from headrace.publication import Probe, TensorSpec
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.replies import EngineResponse
from services.rollout.fleet_build import sglang_factory
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from tests.support.engine_stack import PROMPT, hugging_face_log_probs
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]
RANK = 4


@dataclass(frozen=True)
class Stack:
    fleet: Fleet
    receiver: Receiver
    checkpoint: Path
    root: Path

    def policy(self, version: int) -> Any:
        """A version of the policy as peft has it: the checkpoint with random adapters on every linear layer."""
        torch.manual_seed(version)
        base = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32)
        config = LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(base, config).eval()

    async def publish(self, policy: Any, version: int, **changes: Any) -> None:
        name = changes.pop("publication_id", f"e1-v{version}-0a1b2c3d")
        folder = self.root / f"v{version}"
        policy.save_pretrained(folder)
        whole = hugging_face_log_probs(policy, PROMPT[:1], PROMPT[1:]).tolist()
        content = (folder / "adapter_model.safetensors").read_bytes()
        plan = Plan(
            publication_id=name,
            epoch=1,
            policy_version=version,
            pause_mode="in_place",
            backend="gloo",
            deadline_seconds=240,
            buckets={0: [TensorSpec("all", (1,), "float32")]},
            groups=(),
            folder=folder,
            is_adapter=True,
            **changes,
        )
        await self.receiver.begin(plan)
        await self.receiver.receive(name, 0)
        checksums = {"adapter_model.safetensors": hashlib.sha256(content).hexdigest()}
        await self.receiver.commit(name, checksums, Probe(PROMPT, whole, 1e-4))

    async def ask(self, adapter: str, request_id: str, length: int = 24) -> EngineResponse:
        params = SamplingParams(max_new_tokens=length, temperature=0.0)
        engine = self.fleet.engines[0].client
        return await engine.generate(
            PROMPT, params, request_id=request_id, cache_key=adapter, seconds=240, adapter=adapter
        )


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("adapters")
    checkpoint = make_tiny_qwen3(folder / "model")
    sections = {
        "model": {"hf_checkpoint": checkpoint},
        "lora": {"lora_rank": RANK},
        "publish": {"update_weight_transport": "adapter"},
    }
    factory = sglang_factory(Job.model_validate(sections), folder, has_accelerator=await has_accelerator())
    fleet = Fleet(1, 1, factory, RememberedRouting(), FleetTiming(start_seconds=600, check_interval_seconds=0.5))
    await fleet.start()
    yield Stack(fleet, Receiver(fleet, folder / "weights"), checkpoint, folder / "weights")
    await fleet.stop()


async def test_each_request_is_of_the_version_that_it_began_with_as_peft_computes_it(stack: Stack) -> None:
    first, second = stack.policy(1), stack.policy(2)
    await stack.publish(first, 1)
    with stack.fleet.weights.using_adapter() as former:
        alone = await stack.ask(former, "alone", 200)
        beside = asyncio.create_task(stack.ask(former, "beside", 200))
        await stack.publish(second, 2)
        assert (await beside).tokens == alone.tokens, "it ended as if nothing had been published"
    with stack.fleet.weights.using_adapter() as latter:
        after = await stack.ask(latter, "after")
    for policy, answer, adapter in ((first, alone, former), (second, after, latter)):
        theirs = hugging_face_log_probs(policy, PROMPT, answer.tokens)
        assert torch.tensor(answer.log_probs) == pytest.approx(theirs, abs=2e-4)
        assert {span.name for span in answer.spans} == {adapter}
    assert [await stack.fleet.weights.version_of(name) for name in (former, latter)] == [1, 2]


async def test_an_engine_that_was_killed_loads_the_served_adapter_again(stack: Stack) -> None:
    policy = stack.policy(3)
    await stack.publish(policy, 3)
    engine, served = stack.fleet.engines[0], stack.fleet.weights.adapter
    before = await stack.ask(served, "before")
    assert engine.process is not None
    await engine.process.stop(grace_seconds=0.0)
    async with asyncio.timeout(240):
        while not engine.restarts or engine.state is not EngineState.READY:
            await asyncio.sleep(0.1)
    assert (await stack.ask(served, "again")).tokens == before.tokens
