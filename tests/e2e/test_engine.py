"""One real SGLang fleet of two CPU engines behind the real router, and what a publication does to it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import ChecksumMismatch, GroupGone, InvalidArgument, PublicationAborted
from headrace.job.schema.job import Job
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState, Fleet, FleetTiming
from services.rollout.engine.process import SglangProcess
from services.rollout.engine.replies import Finish
from services.rollout.engine.router import Router
from services.rollout.engine.scaling import Capacity, Scaler
from services.rollout.fleet_build import sglang_factory
from services.rollout.production.generator import Generator, StopStrings
from services.rollout.production.prompts import PromptEncoder
from services.rollout.publication.receiver import Receiver
from tests.long_forms import whole_run
from tests.support.engine_stack import (
    PROMPT,
    Stack,
    a_group,
    always_in_flight,
    hugging_face_log_probs,
    publish,
    shifted,
)
from tests.support.engines.contract import CONTRACT, EngineUnderTest
from tests.support.fakes.engine_checksums import engine_checksums
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.refusals import refused

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = make_tiny_qwen3(folder / "model")
    job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}})
    timing = FleetTiming(start_seconds=600, check_interval_seconds=0.5)
    router = Router(job.rollout, folder / "router.log", request_seconds=240, timing=timing)
    fleet = Fleet(2, 1, sglang_factory(job, folder, has_accelerator=await has_accelerator()), router, timing)
    await asyncio.gather(router.start(), fleet.start())
    kept = asyncio.create_task(router.supervise())
    client = EngineClient(router.url)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    yield Stack(checkpoint, model, fleet, Receiver(fleet), Generator(client, fleet.weights, fleet.suspect), router)
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
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


FITTING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"json_schema": '{"enum": ["red", "green", 7]}'}, '"red"|"green"|7'),
    (
        {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'},
        r"\[\s*(true|false)\s*,\s*(true|false)\s*\]",
    ),
    ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
)


async def test_a_stop_string_ends_the_response_with_the_token_in_which_it_is_complete(stack: Stack) -> None:
    encoder = PromptEncoder(stack.checkpoint, apply_chat_template=False)
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0)
    whole = await stack.generator.generate(PROMPT, greedy, request_id="no-stop", seconds=240)
    stop = encoder.decode(whole.tokens[:12])[-3:]
    expected = next(n for n in range(1, 25) if stop in encoder.decode(whole.tokens[:n]))
    params = replace(greedy, stop=(stop,))
    stopped = await stack.generator.generate(PROMPT, params, request_id="stop-string", seconds=240)
    streamed = [s async for s in stack.generator.stream(PROMPT, params, request_id="stop-streamed", seconds=240)]
    for each in (stopped, streamed[-1]):
        assert (each.tokens, each.finish) == (whole.tokens[:expected], Finish.STOP)
    assert stop in encoder.decode(stopped.tokens)


async def test_a_response_that_is_cut_anywhere_ends_at_its_stop_string_all_the_same(stack: Stack) -> None:
    encoder = PromptEncoder(stack.checkpoint, apply_chat_template=False)
    greedy = SamplingParams(max_new_tokens=24, temperature=0.0)
    whole = await stack.generator.generate(PROMPT, greedy, request_id="uncut", seconds=240)
    params = replace(greedy, stop=(encoder.decode(whole.tokens[8:13]),))
    unbroken = await stack.generator.generate(PROMPT, params, request_id="unbroken", seconds=240)
    assert (unbroken.finish, len(unbroken.tokens) < 24) == (Finish.STOP, True)
    async with EngineClient(stack.router.url) as client:
        ends = StopStrings.of(encoder, stack.checkpoint)
        generator = Generator(client, stack.fleet.weights, stack.fleet.suspect, stop_strings=ends)
        for length in range(1, len(unbroken.tokens) + 1):
            begun = unbroken.until(length, len(PROMPT), Finish.ABORT)
            broken = await generator.generate(PROMPT, params, request_id=f"cut-{length}", seconds=240, begun=begun)
            assert (broken.tokens, broken.finish) == (unbroken.tokens, Finish.STOP), length
            assert broken.log_probs == pytest.approx(unbroken.log_probs, abs=1e-4)


async def test_a_response_fits_its_json_schema_or_regex(stack: Stack) -> None:
    encoder = PromptEncoder(stack.checkpoint, apply_chat_template=False)
    for number, (constraint, fits) in enumerate(FITTING):
        params = SamplingParams(max_new_tokens=400, seed=3, **constraint)
        made = await stack.generator.generate(PROMPT, params, request_id=f"fits-{number}", seconds=240)
        assert re.fullmatch(fits, encoder.decode(made.tokens)), encoder.decode(made.tokens)
        assert made.finish is Finish.STOP


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


@whole_run
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


@whole_run
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


async def test_an_engine_leaves_the_fleet_while_it_generates_and_its_group_is_gone(stack: Stack) -> None:
    version, sender = stack.fleet.policy_version + 1, a_group()
    async with always_in_flight(stack, "through-the-leaving") as finished:
        await publish(stack, sender, shifted(stack.model, 0.01), version=version)
        assert (await Scaler(stack.fleet, Capacity()).scale(1, drain_seconds=0)).leaving == ("engine-1",)
        async with asyncio.timeout(120):
            while len(stack.fleet.engines) > 1:  # another party's state
                await asyncio.sleep(0.05)
        with pytest.raises(GroupGone):
            await publish(stack, sender, shifted(stack.model, 0), version=version + 1)
        alone = await publish(stack, a_group(), shifted(stack.model, 0.01), version=version + 1)
    assert alone.engine_ids == ("engine-0",)
    assert {generation.finish for generation in finished} <= {Finish.STOP, Finish.LENGTH}


async def test_weights_that_differ_from_the_senders_checksums_are_refused(stack: Stack) -> None:
    version = stack.fleet.policy_version
    weights = shifted(stack.model, 0.01)
    lies = engine_checksums(weights) | {"model.norm.weight": "0123456789abcdef"}
    sender = a_group()
    with refused(ChecksumMismatch, "model.norm.weight", "0123456789abcdef"):
        await publish(stack, sender, weights, version=version + 1, checksums=lies)
    assert stack.fleet.policy_version == version
    assert {e.state for e in stack.fleet.engines} <= {EngineState.DOWN, EngineState.STARTING, EngineState.STALE}
