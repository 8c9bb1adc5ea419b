"""A real SGLang engine that loads the folders which the trainer's writer makes, with digests and probe compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from headrace.errors import ChecksumMismatch, FailedPrecondition, InvalidArgument
from headrace.job.schema.job import Job
from headrace.process.scratch import memory_folder
from headrace.publication import Probe
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.fleet_build import sglang_factory
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Plan
from services.trainer.control.senders import WeightWriter
from services.trainer.durable import remove
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import MemoryFiles
from tests.long_forms import whole_run
from tests.support.engine_stack import PROMPT, hugging_face_log_probs, shifted
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.same_weights import ALONE, SameWeights, all_ranks
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [whole_run, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Stack:
    model: Qwen3ForCausalLM
    checkpoint: Path
    fleet: Fleet
    root: Path
    memory_root: Path


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("disk")
    checkpoint = make_tiny_qwen3(folder / "model")
    job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}})
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    fleet = Fleet(1, 1, factory, RememberedRouting(), FleetTiming(start_seconds=600, check_interval_seconds=0.5))
    await fleet.start()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with all_ranks():
        yield Stack(model, checkpoint, fleet, folder / "weights", memory_folder(folder))
    await fleet.stop()
    remove(memory_folder(folder))


async def publish(
    stack: Stack,
    receiver: Receiver,
    version: int,
    *,
    torn_bytes: int = 0,
    flips: bool = False,
    memory: MemoryFiles | None = None,
) -> CommitResult:
    policy, name = SameWeights(dict(stack.model.named_parameters()), stack.checkpoint), f"e1-v{version}-0a1b2c3d"
    root = stack.memory_root if memory else stack.root
    writer = WeightWriter(cast(Policy, policy), ALONE, lambda _: False, root=root, file_bytes=100_000, memory=memory)
    sent = await asyncio.to_thread(writer.send, name, {})
    assert sent is not None
    assert sent.error is None
    file = max((root / name).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= flips
    file.write_bytes(bytes(content[: len(content) - torn_bytes]))
    plan = Plan(
        publication_id=name,
        epoch=1,
        policy_version=version,
        pause_mode="in_place",
        backend="gloo",
        deadline_seconds=240,
        buckets={0: policy.hf_tensor_specs()},
        groups=(),
        folder=root / name,
    )
    await receiver.begin(plan)
    await receiver.receive(name, 0)
    if memory:
        sent = await asyncio.to_thread(writer.send, name, {}, kept=True)
        assert sent is not None
    probe = Probe(PROMPT, hugging_face_log_probs(stack.model, PROMPT[:1], PROMPT[1:]).tolist(), 1e-3)
    return await receiver.commit(name, sent.checksums, probe)


async def served_digest(stack: Stack, receiver: Receiver, version: int, memory: MemoryFiles | None = None) -> str:
    """Of new weights that are published, and with which the engine then computes."""
    shifted(stack.model, 0.01)
    committed = await publish(stack, receiver, version, memory=memory)
    async with EngineClient(stack.fleet.engines[0].url) as client:
        generator = Generator(client, stack.fleet.weights)
        params = SamplingParams(max_new_tokens=8)
        generation = await generator.generate(PROMPT, params, request_id=f"v{version}", seconds=240)
    assert {r.policy_version for r in generation.policy_ranges} == {version}
    expected = hugging_face_log_probs(stack.model, PROMPT, generation.tokens)
    assert torch.allclose(torch.tensor(generation.log_probs), expected, atol=1e-4)
    return committed.weights_digest


async def test_a_real_engine_serves_what_it_loads_from_a_folder_and_refuses_what_is_not_as_it_was_sent(
    stack: Stack,
) -> None:
    receiver, fleet = Receiver(stack.fleet, stack.root), stack.fleet
    assert len({await served_digest(stack, receiver, version) for version in (1, 2)}) == 2

    with pytest.raises(FailedPrecondition, match="is not a whole folder of weights"):
        await publish(stack, receiver, 3, torn_bytes=1)
    await receiver.abort("e1-v3-0a1b2c3d", "the trainer heard of it")
    assert [(engine.state, engine.restarts) for engine in fleet.engines] == [(EngineState.READY, 0)]

    (stack.root / "empty").mkdir()
    with pytest.raises((InvalidArgument, FailedPrecondition)):
        await fleet.engines[0].client.load_folder(str(stack.root / "empty"), seconds=60)
    assert (await publish(stack, receiver, 4)).lost_engine_ids == (), "a refusal leaves the engine as it was"

    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors differ; first .*: sent"):
        await publish(stack, receiver, 5, flips=True)
    assert fleet.policy_version == 4


async def test_a_real_engine_serves_what_lies_in_shared_memory_and_refuses_what_is_not_as_it_was_laid(
    stack: Stack,
) -> None:
    receiver, memory = Receiver(stack.fleet, stack.memory_root), MemoryFiles()
    while stack.fleet.alive() == []:  # the test before may have left it to be started again
        await asyncio.sleep(0.5)
    assert len({await served_digest(stack, receiver, version, memory) for version in (6, 7, 8)}) == 3
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors differ; first .*: sent"):
        await publish(stack, receiver, 9, flips=True, memory=memory)
    assert stack.fleet.policy_version == 8
