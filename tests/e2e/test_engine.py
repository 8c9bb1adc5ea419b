"""One real SGLang fleet of two CPU engines behind the real router, and what a publication does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from headrace.errors import ChecksumMismatch, InvalidArgument, PublicationAborted, Unavailable
from headrace.job.schema.job import Job
from headrace.probe import Probe
from headrace.wire.tensor_spec import TensorSpec
from services.rollout.build import sglang_factory
from services.rollout.engine.answer import BadAnswer, Finish
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Engine, EngineState, Fleet, FleetTiming
from services.rollout.engine.machine import has_accelerator
from services.rollout.engine.process import SglangProcess
from services.rollout.engine.router import Router
from services.rollout.production.generator import Generator
from services.rollout.publication.publication import Committed
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.weights.weight_group import WeightGroup
from tests.support.fakes.engine_checksums import engine_checksums, flat_bytes
from tests.support.fakes.engine_contract import CONTRACT, EngineUnderTest
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.forks import forks_below
from tests.support.processes.listening import listening_of_tree, open_to_others

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = (1, 45, 67, 89, 2)


@dataclass(frozen=True)
class Stack:
    checkpoint: Path
    model: Qwen3ForCausalLM
    fleet: Fleet
    receiver: Receiver
    generator: Generator
    router_url: str


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = make_tiny_qwen3(folder / "model")
    job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}})
    router = Router("cache_aware", folder / "router.log", request_seconds=240)
    timing = FleetTiming(start_seconds=600, check_interval_seconds=0.5)
    fleet = Fleet(2, 1, sglang_factory(job, folder, has_accelerator=await has_accelerator()), router, timing)
    await asyncio.gather(router.start(), fleet.start())
    client = EngineClient(router.url)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    yield Stack(checkpoint, model, fleet, Receiver(fleet), Generator(client, fleet.weights, fleet.suspect), router.url)
    await client.close()
    await asyncio.gather(fleet.stop(), router.stop())


async def test_generated_log_probs_equal_hugging_faces(stack: Stack) -> None:
    prompts = [(*PROMPT, extra) for extra in range(10, 18)]
    params = SamplingParams(max_new_tokens=24)
    generations = await asyncio.gather(
        *(stack.generator.generate(p, params, request_id=f"hf-{p[-1]}", seconds=240) for p in prompts)
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.finish in (Finish.STOP, Finish.LENGTH)
        assert [(r.policy_version, r.start, r.end) for r in generation.policy_ranges] == [
            (stack.fleet.policy_version, 0, len(generation.tokens))
        ]
        expected = hugging_face_log_probs(stack.model, prompt, generation.tokens)
        assert torch.allclose(torch.tensor(generation.log_probs), expected, atol=1e-4)


@pytest.mark.parametrize("promise", CONTRACT)
async def test_an_sglang_engine_keeps_the_contract(stack: Stack, promise: str) -> None:
    await CONTRACT[promise](EngineUnderTest(stack.fleet.engines[0], stack.fleet.weights))


async def test_engines_and_router_listen_on_loopback_alone(stack: Stack) -> None:
    listens = listening_of_tree(os.getpid())
    assert sum("services.rollout.engine.launch" in command for command in listens.values()) >= 2
    assert open_to_others(listens) == [], listens


def test_on_a_cpu_schedulers_and_detokenizers_are_forks_of_their_servers(stack: Stack) -> None:
    assert forks_below(os.getpid()) == [*["sglang::detokenizer"] * 2, *["sglang::scheduler"] * 2]


async def test_a_stop_token_ends_the_response_and_stays_in_it(stack: Stack) -> None:
    params = SamplingParams(max_new_tokens=200, stop_token_ids=tuple(range(150)))
    generation = await stack.generator.generate(PROMPT, params, request_id="stop", seconds=240)
    assert generation.finish is Finish.STOP
    assert generation.tokens[-1] < 150


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_input_longer_than_the_context_is_refused_at_once_with_the_engines_words(
    stack: Stack, streaming: bool
) -> None:
    prompt, params = [5] * 5000, SamplingParams(max_new_tokens=4)
    if streaming:
        asking = anext(stack.generator.stream(prompt, params, request_id="long-streamed", seconds=240))
    else:
        asking = stack.generator.generate(prompt, params, request_id="long", seconds=240)
    with pytest.raises(InvalidArgument, match=r"(?i)length|context|longer"):
        await asking


async def test_engines_that_are_examined_and_answer_well_stay(stack: Stack) -> None:
    restarts = [engine.restarts for engine in stack.fleet.engines]
    stack.fleet.suspect(BadAnswer("not_json", "nobody's"))
    async with asyncio.timeout(120):
        while any(engine.is_suspect for engine in stack.fleet.engines):  # another party's state
            await asyncio.sleep(0.05)
    generation = await stack.generator.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="e", seconds=240)
    assert generation.tokens
    assert [(e.bad_answers, e.restarts, e.state) for e in stack.fleet.engines] == [
        (0, before, EngineState.READY) for before in restarts
    ]


async def test_published_weights_are_served_by_all_engines(stack: Stack) -> None:
    weights = shifted(stack.model, 0.02)
    sender = a_group()
    first = await publish(stack, sender, weights, version=1)
    assert first.engine_ids == ("engine-0", "engine-1")
    assert {e.weights_digest for e in stack.fleet.engines} == {first.weights_digest}
    generation = await stack.generator.generate(PROMPT, SamplingParams(max_new_tokens=16), request_id="v1", seconds=240)
    assert {r.policy_version for r in generation.policy_ranges} == {1}
    expected = hugging_face_log_probs(stack.model, PROMPT, generation.tokens)
    assert torch.allclose(torch.tensor(generation.log_probs), expected, atol=1e-4)

    again = await publish(stack, sender, shifted(stack.model, 0.01), version=2)
    assert again.weights_digest != first.weights_digest
    assert again.paused_seconds > 0


@pytest.mark.parametrize("pause_mode", ["in_place", "retract", "abort"])
async def test_a_request_in_flight_carries_both_versions(stack: Stack, pause_mode: str) -> None:
    before = stack.fleet.policy_version
    async with always_in_flight(stack, f"both-{pause_mode}") as finished:
        for version in range(before + 1, before + 4):  # one alone may come when all three have just begun
            await publish(stack, a_group(), shifted(stack.model, 0.01), version=version, pause_mode=pause_mode)
    several = [g for g in finished if len(g.policy_ranges) > 1]
    assert several, [g.policy_ranges for g in finished]
    for generation in several:
        ranges = generation.policy_ranges
        assert all(one.policy_version < other.policy_version for one, other in pairwise(ranges))
        assert all(one.end == other.start for one, other in pairwise(ranges))
        assert ranges[-1].end == len(generation.tokens) == len(generation.log_probs)


@asynccontextmanager
async def always_in_flight(stack: Stack, name: str) -> AsyncIterator[list[Generation]]:
    """Three at a time, one after the other, until the block is left; those in flight then finish.

    The block begins when all three have tokens: a request without any has nothing of the version that it began with.
    """
    finished: list[Generation] = []
    num_tokens = [0, 0, 0]
    leaving = asyncio.Event()

    async def ask(number: int) -> None:
        while not leaving.is_set():
            request_id, params = f"{name}-{number}-{len(finished)}", SamplingParams(max_new_tokens=100)
            async for so_far in stack.generator.stream(PROMPT, params, request_id=request_id, seconds=600):
                num_tokens[number] = len(so_far.tokens)
            finished.append(so_far)
            num_tokens[number] = 0

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(ask(number))
        while not all(num_tokens):  # other parties' work
            await asyncio.sleep(0.001)
        try:
            yield finished
        finally:
            leaving.set()


async def test_an_engine_that_is_killed_comes_back_stale_and_gets_the_served_weights_alone(stack: Stack) -> None:
    version = stack.fleet.policy_version + 1  # not hf_checkpoint's, with which it comes back
    await publish(stack, a_group(), shifted(stack.model, 0.01), version=version)
    victim = stack.fleet.engines[1]
    assert isinstance(victim.process, SglangProcess)
    os.kill(victim.process.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        while victim.state is EngineState.READY:  # another party's state
            await asyncio.sleep(0.05)
    generation = await stack.generator.generate(
        PROMPT, SamplingParams(max_new_tokens=8), request_id="one-left", seconds=240
    )
    assert len(generation.tokens) > 0
    async with asyncio.timeout(600):
        while victim.state is not EngineState.STALE:  # another party's state
            await asyncio.sleep(0.1)
    assert victim.restarts == 1
    served = dict(stack.model.named_parameters())
    alone = a_group()
    assert (await publish(stack, alone, served, version=version, engine_ids=("engine-1",))).engine_ids == ("engine-1",)
    assert [e.state for e in stack.fleet.engines] == [EngineState.READY, EngineState.READY]
    assert len({e.weights_digest for e in stack.fleet.engines}) == 1
    committed = await publish(stack, a_group(), shifted(stack.model, 0.01), version=version + 1)
    assert committed.engine_ids == ("engine-0", "engine-1")


@pytest.mark.skipif(os.environ.get("HEADRACE_WHOLE_RUNS") != "all", reason="long: make chaos sets HEADRACE_WHOLE_RUNS")
async def test_an_engine_killed_in_a_broadcast_does_not_take_the_other_with_it(stack: Stack) -> None:
    version = stack.fleet.policy_version
    survivor, victim = stack.fleet.engines
    restarts = survivor.restarts, victim.restarts
    weights = shifted(stack.model, 0.01)
    async with always_in_flight(stack, "through-the-kill") as finished:
        with pytest.raises(PublicationAborted, match=f"engines lost in a collective.*{victim.engine_id}"):
            await publish(stack, a_group(), weights, version=version + 1, killed_in_the_last_bucket=victim)
        assert stack.fleet.policy_version == version
        again = await publish(stack, a_group(), weights, version=version + 1)
        assert survivor.engine_id in again.engine_ids
        assert (survivor.restarts, survivor.state) == (restarts[0], EngineState.READY)
    assert [version, version + 1] in [[r.policy_version for r in g.policy_ranges] for g in finished]
    async with asyncio.timeout(600):
        while victim.state not in (EngineState.STALE, EngineState.READY):  # another party's state
            await asyncio.sleep(0.1)
    assert victim.restarts == restarts[1] + 1
    if victim.state is EngineState.STALE:
        await publish(stack, a_group(), weights, version=version + 1, engine_ids=(victim.engine_id,))
    assert {engine.weights_digest for engine in stack.fleet.engines} == {again.weights_digest}


async def test_engines_that_compute_something_else_than_the_trainer_are_refused(stack: Stack) -> None:
    version = stack.fleet.policy_version
    sender = a_group()
    with pytest.raises(PublicationAborted, match=r"probe's log-probs differ by 1 in the mean, more than 0\.001"):
        await publish(stack, sender, shifted(stack.model, 0.01), version=version + 1, probe_error=1.0)
    assert stack.fleet.policy_version == version
    async with asyncio.timeout(600):
        while any(e.state is not EngineState.STALE for e in stack.fleet.engines):  # another party's state
            await asyncio.sleep(0.1)
    again = a_group()
    assert len((await publish(stack, again, shifted(stack.model, 0.01), version=version + 1)).engine_ids) == 2


async def test_weights_that_differ_from_the_senders_checksums_are_refused(stack: Stack) -> None:
    version = stack.fleet.policy_version
    weights = shifted(stack.model, 0.01)
    lies = engine_checksums(weights) | {"model.norm.weight": "0123456789abcdef"}
    sender = a_group()
    with pytest.raises(ChecksumMismatch, match=r"first model\.norm\.weight: sent 0123456789abcdef"):
        await publish(stack, sender, weights, version=version + 1, checksums=lies)
    assert stack.fleet.policy_version == version
    assert {e.state for e in stack.fleet.engines} <= {EngineState.DOWN, EngineState.STARTING, EngineState.STALE}


async def test_an_engine_that_will_not_start_shows_its_last_words(stack: Stack, tmp_path: Path) -> None:
    options = EngineOptions(stack.checkpoint, 1, 0, {"attention_backend": "no_such_backend"}, threads=1)
    engine = SglangProcess(options, 0, tmp_path / "engine-0.log", has_accelerator=await has_accelerator())
    with pytest.raises(Unavailable, match="no_such_backend") as caught:
        await engine.start(seconds=240)
    assert caught.value.reason == "ENGINE_START_FAILED"
    await engine.stop()


async def publish(
    stack: Stack,
    sender: WeightGroup,
    weights: Mapping[str, torch.Tensor],
    *,
    version: int,
    pause_mode: str = "in_place",
    checksums: Mapping[str, str] | None = None,
    engine_ids: Sequence[str] = (),
    probe_error: float = 0.0,
    killed_in_the_last_bucket: Engine | None = None,
) -> Committed:
    buckets = two_buckets(weights)
    specs = [[TensorSpec(name, tuple(weights[name].shape), "float32") for name in names] for names in buckets]
    plan = Plan(
        publication_id=uuid.uuid4().hex,
        epoch=1,
        policy_version=version,
        pause_mode=pause_mode,
        backend="gloo",
        deadline_seconds=240,
        buckets=dict(enumerate(specs)),
        groups=[GroupPlan(sender.name, "127.0.0.1", sender.port, tuple(range(len(buckets))), joined=sender.joined)],
        engine_ids=engine_ids,
    )
    begun = await stack.receiver.begin(plan)
    if not sender.joined:
        await asyncio.to_thread(sender.join, begun.world_size, lambda: False)
    for number, names in enumerate(buckets):
        victim = killed_in_the_last_bucket if number == len(buckets) - 1 else None
        if victim:
            signal_all(victim, signal.SIGSTOP)  # so that the sender is not through before it is killed
        flat = torch.cat([flat_bytes(weights[name]) for name in names])
        sending = asyncio.create_task(asyncio.to_thread(sender.broadcast, flat, lambda: False))
        receiving = asyncio.create_task(stack.receiver.receive(plan.publication_id, number))
        if victim:
            await asyncio.wait([sending, receiving], timeout=1.0)  # neither can end: now they are in it
            signal_all(victim, signal.SIGKILL)
        await asyncio.wait([sending, receiving])
        await receiving
        await sending
    truth = hugging_face_log_probs(stack.model, PROMPT[:1], PROMPT[1:])
    probe = Probe(PROMPT, (truth + probe_error).tolist(), max_mean_difference=1e-3)
    return await stack.receiver.commit(plan.publication_id, checksums or engine_checksums(weights), probe)


def a_group() -> WeightGroup:
    return WeightGroup(f"group-{uuid.uuid4().hex}", "127.0.0.1", "gloo", 60.0)


def signal_all(engine: Engine, number: signal.Signals) -> None:
    """To the engine and what it has started."""
    assert isinstance(engine.process, SglangProcess)
    os.killpg(engine.process.pid, number)


def two_buckets(weights: Mapping[str, torch.Tensor]) -> Sequence[Sequence[str]]:
    names = list(weights)
    return names[: len(names) // 2], names[len(names) // 2 :]


def shifted(model: Qwen3ForCausalLM, scale: float) -> dict[str, torch.Tensor]:
    """Moves the model's weights, and answers them by their names in the checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return dict(model.named_parameters())


def hugging_face_log_probs(model: Qwen3ForCausalLM, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0].float()
    log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
