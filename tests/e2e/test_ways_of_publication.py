"""A real SGLang engine takes new weights on every way, in float32 and in block FP8, bit for bit as they were sent.

Deltas also reach engines of two ranks and engines of experts.

On a CPU it holds and hashes FP8; it cannot compute with it, because its FP8 kernels are Triton's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headrace.errors import ChecksumMismatch, FailedPrecondition
from headrace.job.schema.job import Job
from headrace.models.folders import QuantizedForm
from headrace.process.scratch import memory_folder
from headrace.publication import Probe
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.fleet_build import sglang_factory, slots_of
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import CommitResult
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Delta, GroupPlan, Plan
from services.trainer.control.senders import WeightSender, WeightWriter
from services.trainer.durable import remove
from services.trainer.hugging_face.rewrite.to_fp8 import to_fp8
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import MemoryFiles
from services.trainer.weights.quantization import quantized_specs
from tests.long_forms import whole_run
from tests.support.engine_stack import PROMPT, hugging_face_log_probs
from tests.support.fakes.fake_fleet import RememberedRouting
from tests.support.fakes.same_weights import ALONE, SameWeights, all_ranks
from tests.support.models.tiny_families import EXPERTS_OF_ENGINES, make_tiny
from tests.support.models.tiny_model import make_tiny_qwen3, make_tiny_tokenizer

pytestmark = [whole_run, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Stack:
    model: Qwen3ForCausalLM | None
    """What the probe is computed with."""
    weights: Mapping[str, Tensor]
    checkpoint: Path
    form: QuantizedForm | None
    fleet: Fleet
    roots: dict[str, Path]
    memory: MemoryFiles
    hashes: bool
    senders: dict[str, WeightSender | WeightWriter] = field(default_factory=dict)

    def sender(self, way: str) -> WeightSender | WeightWriter:
        """The same one at each call: it remembers what was published."""
        policy, form, hashes = cast(Policy, self.source), self.form, self.hashes
        if way not in self.senders and way == "disk":
            self.senders[way] = WeightWriter(
                policy, ALONE, lambda _: False, root=self.roots["disk"], file_bytes=100_000, form=form, hashes=hashes
            )
        elif way not in self.senders:
            self.senders[way] = WeightSender(
                policy, ALONE, lambda _: False, host="127.0.0.1", bucket_bytes=512 << 20, timeout_seconds=240,
                form=form, hashes=hashes,
            )  # fmt: skip
        return self.senders[way]

    @property
    def source(self) -> SameWeights:
        return SameWeights(self.weights, self.checkpoint)

    def plan(self, version: int, *, group: GroupPlan | None = None, root: Path | None = None) -> Plan:
        specs = self.source.hf_tensor_specs()
        name = f"e1-v{version}-0a1b2c3d"
        return Plan(
            publication_id=name,
            epoch=1,
            policy_version=version,
            pause_mode="in_place",
            backend="gloo",
            deadline_seconds=240,
            buckets={0: quantized_specs(self.form, specs) if self.form else specs},
            groups=() if group is None else (group,),
            folder=None if root is None else root / name,
        )

    def probe(self) -> Probe | None:
        if self.form or self.model is None:
            return None
        return Probe(PROMPT, hugging_face_log_probs(self.model, PROMPT[:1], PROMPT[1:]).tolist(), 1e-3)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with all_ranks():
        yield


@pytest.fixture(scope="module", params=["float32", "fp8"])
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[Stack]:
    plain, form, dtype, sections = folder / "model", None, torch.float32, {}
    if kind == "fp8":
        plain, dtype, sections = folder / "plain", torch.bfloat16, {"sglang": {"dtype": "bfloat16"}}
        config = Qwen3Config(
            vocab_size=320, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3ForCausalLM(config).to(dtype).save_pretrained(plain)
        make_tiny_tokenizer().save_pretrained(plain)
        form = to_fp8(plain, folder / "model")
    elif kind == "experts":
        make_tiny(plain, "qwen3_moe", moe_intermediate_size=EXPERTS_OF_ENGINES["moe_intermediate_size"])
    else:
        make_tiny_qwen3(plain)
    if kind == "two ranks":
        sections = {"placement": {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}}
    job = Job.model_validate({"model": {"hf_checkpoint": folder / "model"}, **sections})
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    timing = FleetTiming(start_seconds=600, check_interval_seconds=0.5)
    fleet = Fleet(1, slots_of(job), factory, RememberedRouting(), timing)
    await fleet.start()
    if kind == "experts":  # transformers stacks them
        found = {name: tensor for file in plain.glob("*.safetensors") for name, tensor in load_file(file).items()}
        model, weights = None, {name: found[name] for name in sorted(found, key=_as_engines_fuse)}
    else:
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
        weights = {name: each.detach() for name, each in model.named_parameters()}
    roots = {"disk": folder / "weights", "ipc": memory_folder(folder)}
    hashes = kind != "two ranks"
    yield Stack(model, weights, folder / "model", form, fleet, roots, MemoryFiles(), hashes)
    await fleet.stop()
    remove(memory_folder(folder))


def _as_engines_fuse(name: str) -> list[int | str]:
    """Sorts layers and experts by number; queries before keys before values, and gates before what they gate."""
    first = {"q_proj": "0", "k_proj": "1", "v_proj": "2", "gate_proj": "0", "up_proj": "1"}
    return [int(part) if part.isdigit() else first.get(part, part) for part in name.split(".")]


async def broadcast(stack: Stack, version: int) -> CommitResult:
    sender = WeightSender(
        cast(Policy, stack.source),
        ALONE,
        lambda _: False,
        host="127.0.0.1",
        bucket_bytes=512 << 20,
        timeout_seconds=240,
        form=stack.form,
    )
    opened = sender.open(0)
    assert opened is not None
    plan = stack.plan(version, group=GroupPlan(opened.name, opened.host, opened.port, (0,), joined=False))
    receiver = Receiver(stack.fleet)
    begun = await receiver.begin(plan)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, plan.publication_id, {0: begun.world_size}))
    await receiver.receive(plan.publication_id, 0)
    sent = await sending
    sender.drop([0])
    assert sent is not None
    assert sent.error is None
    return await receiver.commit(plan.publication_id, sent.checksums, stack.probe())


async def through_files(
    stack: Stack, way: str, version: int, *, torn_bytes: int = 0, flips: bool = False, receiver: Receiver | None = None
) -> CommitResult:
    root, memory = stack.roots[way], stack.memory if way == "ipc" else None
    writer = WeightWriter(
        cast(Policy, stack.source),
        ALONE,
        lambda _: False,
        root=root,
        file_bytes=100_000,
        memory=memory,
        form=stack.form,
        hashes=stack.hashes,
    )
    plan = stack.plan(version, root=root)
    name = plan.publication_id
    sent = await asyncio.to_thread(writer.send, name, {})
    assert sent is not None
    assert sent.error is None
    file = max((root / name).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= flips
    file.write_bytes(bytes(content[: len(content) - torn_bytes]))
    receiver = receiver or Receiver(stack.fleet, root)
    await receiver.begin(plan)
    try:
        await receiver.receive(name, 0)
    except FailedPrecondition:
        await receiver.abort(name, "the trainer heard of it")
        raise
    if memory:
        sent = await asyncio.to_thread(writer.send, name, {}, kept=True)
        assert sent is not None
    return await receiver.commit(name, sent.checksums, stack.probe())


async def test_an_engine_has_the_weights_that_were_sent_on_every_way_and_computes_with_them(stack: Stack) -> None:
    digests = []
    for version, way in enumerate(["collective", "disk", "ipc"], start=1):
        with torch.no_grad():
            for weight in stack.weights.values():
                weight.mul_(1.01)
        committed = await (broadcast(stack, version) if way == "collective" else through_files(stack, way, version))
        digests.append(committed.weights_digest)
        if stack.form is None and stack.model is not None:
            async with EngineClient(stack.fleet.engines[0].url) as client:
                made = await Generator(client, stack.fleet.weights).generate(
                    PROMPT, SamplingParams(max_new_tokens=8), request_id=way, seconds=240
                )
            assert {r.policy_version for r in made.policy_ranges} == {version}
            expected = hugging_face_log_probs(stack.model, PROMPT, made.tokens)
            assert torch.allclose(torch.tensor(made.log_probs), expected, atol=1e-4)
        again = await through_files(stack, "disk", version + 10)
        assert again.weights_digest == digests[-1], "what one way brought, the other would have brought"
    assert len(set(digests)) == 3
    if stack.form:
        (folder,) = stack.roots["disk"].glob("e1-v13-*")
        assert QuantizedForm.of(folder) == stack.form, "engines that load it take it for what they serve"
        found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        specs = {spec.name: spec.dtype for spec in stack.plan(0, root=folder).buckets[0]}
        assert {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in found.items()} == specs


async def by_delta(stack: Stack, way: str, version: int, receiver: Receiver, base: CommitResult) -> CommitResult:
    """What changed since `base`, whose weights are `stack.kept`."""
    sender = stack.sender(way)
    compared = sender.compare()
    assert compared is not None
    assert compared.delta_bytes is not None
    if way == "disk":
        plan = stack.plan(version, root=stack.roots["disk"])
        sent = await asyncio.to_thread(sender.send_delta, plan.publication_id, {})
        folder = stack.roots["disk"] / f"e1-v{version - 1}-0a1b2c3d"
        await receiver.begin(replace(plan, delta=Delta(base.weights_digest, base_folders=[folder])))
        await receiver.receive(plan.publication_id, 0)
    else:
        opened = sender.open(0)
        assert opened is not None
        group = GroupPlan(opened.name, opened.host, opened.port, (0,), joined=False)
        delta = Delta(base.weights_digest, bucket_bytes=[compared.delta_bytes])
        plan = stack.plan(version, group=group)
        begun = await receiver.begin(replace(plan, delta=delta))
        sending = asyncio.create_task(asyncio.to_thread(sender.send_delta, plan.publication_id, {0: begun.world_size}))
        await receiver.receive(plan.publication_id, 0)
        sent = await sending
        sender.drop([0])
    assert sent is not None
    assert sent.error is None
    if way == "disk":
        sent = await asyncio.to_thread(sender.send, plan.publication_id, {}, kept=True)
        assert sent is not None
    return await receiver.commit(plan.publication_id, sent.checksums, stack.probe())


@pytest.mark.parametrize("way", ["disk", "collective"])
async def test_a_delta_gives_an_engine_the_weights_that_the_whole_gives_it(stack: Stack, way: str) -> None:
    await a_delta_and_the_whole_agree(stack, way)


@pytest.mark.parametrize("kind", ["two ranks", "experts"])
async def test_a_delta_lands_in_each_rank_and_each_expert_as_the_whole_does(tmp_path: Path, kind: str) -> None:
    async with running(kind, tmp_path) as stack:
        for way in ("disk", "collective"):
            await a_delta_and_the_whole_agree(stack, way)


async def a_delta_and_the_whole_agree(stack: Stack, way: str) -> None:
    first = {"disk": 30, "collective": 40}[way]
    receiver = Receiver(stack.fleet, stack.roots["disk"])
    base = await through_files(stack, "disk", first, receiver=receiver)
    stack.sender(way).keep()
    for number, weight in enumerate(stack.weights.values()):
        weight.view(-1)[number::97].mul_(0.5)
    changed = await by_delta(stack, way, first + 1, receiver, base)
    whole = await through_files(stack, "disk", first + 2)
    assert changed.weights_digest == whole.weights_digest
    assert changed.weights_digest != base.weights_digest


async def test_what_is_not_as_it_was_sent_is_not_served(stack: Stack) -> None:
    fleet = stack.fleet
    await through_files(stack, "disk", 20)
    with pytest.raises(FailedPrecondition, match="is not a whole folder of weights"):
        await through_files(stack, "disk", 21, torn_bytes=1)
    assert [(engine.state, engine.restarts) for engine in fleet.engines] == [(EngineState.READY, 0)]
    with pytest.raises(ChecksumMismatch, match=r"1 of \d+ tensors differ; first .*: sent"):
        await through_files(stack, "ipc", 22, flips=True)
    assert fleet.policy_version == 20
