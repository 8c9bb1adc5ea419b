"""A real SGLang engine that serves block FP8 takes new weights in FP8, on every way, bit for bit as they were sent.

On a CPU it holds them and hashes them; it cannot compute with them, because its FP8 kernels are Triton's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headrace.errors import ChecksumMismatch
from headrace.job.schema.job import Job
from headrace.models.folders import BlockFp8
from headrace.process.scratch import memory_folder
from headrace.publication import TensorSpec
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.fleet_build import sglang_factory
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.control.senders import WeightSender, WeightWriter
from services.trainer.durable import remove
from services.trainer.hugging_face.rewrite.to_fp8 import to_fp8
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import MemoryFiles
from services.trainer.weights.quantization import quantized_specs
from tests.long_forms import whole_run
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.same_weights import ALONE, SameWeights, all_ranks
from tests.support.models.tiny_model import make_tiny_tokenizer

pytestmark = [whole_run, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Stack:
    weights: dict[str, torch.Tensor]
    checkpoint: Path
    form: BlockFp8
    fleet: Fleet
    roots: dict[str, Path]

    def source(self) -> Policy:
        return cast(Policy, SameWeights(self.weights, self.checkpoint))

    def specs(self) -> list[TensorSpec]:
        return quantized_specs(self.form, self.source().hf_tensor_specs())


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("fp8")
    tokenizer = make_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=320, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    form = to_fp8(folder / "plain", folder / "model")
    assert BlockFp8.of(folder / "model") == form
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.bfloat16)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    job = Job.model_validate({"model": {"hf_checkpoint": folder / "model"}, "sglang": {"dtype": "bfloat16"}})
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    fleet = Fleet(1, 1, factory, RememberedRouting(), FleetTiming(start_seconds=600, check_interval_seconds=0.5))
    await fleet.start()
    roots = {"disk": folder / "weights", "ipc": memory_folder(folder)}
    with all_ranks():
        yield Stack(weights, folder / "model", form, fleet, roots)
    await fleet.stop()
    remove(roots["ipc"])


def plan_of(stack: Stack, version: int, *, group: GroupPlan | None = None, root: Path | None = None) -> Plan:
    name = f"e1-v{version}-0a1b2c3d"
    return Plan(
        publication_id=name,
        epoch=1,
        policy_version=version,
        pause_mode="in_place",
        backend="gloo",
        deadline_seconds=240,
        buckets={0: stack.specs()},
        groups=() if group is None else (group,),
        folder=None if root is None else root / name,
    )


async def broadcast(stack: Stack, version: int, spoiled: Mapping[str, str] | None = None) -> CommitResult:
    """With the sender's checksums, but for those that are `spoiled`."""
    sender = WeightSender(
        stack.source(),
        ALONE,
        lambda _: False,
        host="127.0.0.1",
        bucket_bytes=512 << 20,
        timeout_seconds=240,
        form=stack.form,
    )
    opened = sender.open(0)
    assert opened is not None
    plan = plan_of(stack, version, group=GroupPlan(opened.name, opened.host, opened.port, (0,), joined=False))
    receiver = Receiver(stack.fleet)
    begun = await receiver.begin(plan)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, plan.publication_id, {0: begun.world_size}))
    await receiver.receive(plan.publication_id, 0)
    sent = await sending
    sender.drop([0])
    assert sent is not None
    assert sent.error is None
    return await receiver.commit(plan.publication_id, sent.checksums | (spoiled or {}))


async def through_files(stack: Stack, way: str, version: int) -> CommitResult:
    root, memory = stack.roots[way], MemoryFiles() if way == "ipc" else None
    writer = WeightWriter(
        stack.source(), ALONE, lambda _: False, root=root, file_bytes=1 << 20, memory=memory, form=stack.form
    )
    plan = plan_of(stack, version, root=root)
    sent = await asyncio.to_thread(writer.send, plan.publication_id, {})
    assert sent is not None
    assert sent.error is None
    receiver = Receiver(stack.fleet, root)
    await receiver.begin(plan)
    await receiver.receive(plan.publication_id, 0)
    kept = await asyncio.to_thread(writer.send, plan.publication_id, {}, kept=True)
    assert kept is not None
    return await receiver.commit(plan.publication_id, kept.checksums)


async def test_an_engine_has_the_quantized_weights_that_were_sent_on_every_way(stack: Stack) -> None:
    digests = []
    for version, way in enumerate(["collective", "disk", "ipc"], start=1):
        for weight in stack.weights.values():
            weight.mul_(1.01)
        by_files = through_files(stack, way, version) if way != "collective" else None
        committed = await (by_files or broadcast(stack, version))
        digests.append(committed.weights_digest)
        again = await through_files(stack, "disk", version + 10)
        assert again.weights_digest == digests[-1], "what one way brought, the other would have brought"
    assert len(set(digests)) == 3
    specs = stack.specs()
    plain = sum(spec.num_bytes for spec in SameWeights(stack.weights, stack.checkpoint).hf_tensor_specs())
    assert sum(spec.num_bytes for spec in specs) < 0.6 * plain
    (folder,) = stack.roots["disk"].glob("e1-v13-*")
    assert BlockFp8.of(folder) == stack.form, "engines that load it take it for what they serve"
    found = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert {name: str(t.dtype).removeprefix("torch.") for name, t in found.items()} == {s.name: s.dtype for s in specs}


async def test_fp8_that_is_not_as_it_was_sent_is_not_served(stack: Stack) -> None:
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors differ; first .*: sent"):
        await broadcast(stack, 20, {"model.layers.1.mlp.gate_up_proj.weight": "0" * 16})
    assert stack.fleet.policy_version != 20
