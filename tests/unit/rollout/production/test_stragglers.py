"""Samples that exceed --generate-timeout-seconds: with --partial-rollout their tokens go back to the ledger."""

from __future__ import annotations

import asyncio

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import DeadlineExceeded, Unavailable
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator, request_ender
from services.rollout.production.groups import GroupSampler
from services.rollout.production.partial import PartialRollout
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler
from tests.support.fakes.fake_engine import response_to
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.fakes.memory_ledger import lease
from tests.support.models.tiny_model import make_tiny_tokenizer

PROMPT = (1, 2, 3)
ENDLESS = SamplingParams(max_new_tokens=5000)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return PromptEncoder(folder, apply_chat_template=False)


def generator_of(fakes: FakeFleet) -> Generator:
    """Over one engine, as the router would send it there."""
    end = request_ender(lambda: fakes.fleet.engines)
    return Generator(fakes.fleet.engines[0].client, fakes.fleet.weights, end_request=end)


def group_of(
    fakes: FakeFleet, encoder: PromptEncoder, params: SamplingParams, *, seconds: float, max_staleness: int = 1
) -> GroupSampler:
    return GroupSampler(
        encoder,
        EngineSampler(generator_of(fakes), encoder, seconds=seconds),
        None,
        params,
        rollout_seed=1,
        max_prompt_tokens=None,
        context=None,
        partial_rollout=PartialRollout(mask_offpolicy=False, max_staleness=max_staleness),
    )


async def test_at_its_time_limit_a_response_comes_back_with_its_tokens_and_the_engine_is_free(fakes: FakeFleet) -> None:
    interruption = asyncio.Event()
    partial = await generator_of(fakes).generate(
        PROMPT, ENDLESS, request_id="r", seconds=0.8, return_partial=interruption
    )
    assert partial.finish is Finish.ABORT
    assert list(partial.tokens) == response_to(PROMPT, len(partial.tokens))
    assert partial.tokens
    assert not interruption.is_set(), "the others of its group have time limits of their own"
    assert [fakes.fake(number).num_in_flight for number in (0, 1)] == [0, 0]


async def test_a_request_of_a_similar_id_goes_on(fakes: FakeFleet) -> None:
    generator = generator_of(fakes)
    other = asyncio.create_task(
        generator.generate(PROMPT, SamplingParams(max_new_tokens=400), request_id="g/1/1", seconds=60)
    )
    await generator.generate(PROMPT, ENDLESS, request_id="g/1/10", seconds=0.1, return_partial=asyncio.Event())
    assert (await other).finish is Finish.LENGTH


async def test_without_a_partial_the_time_limit_is_an_error(fakes: FakeFleet) -> None:
    with pytest.raises(DeadlineExceeded, match=r"did not answer within"):
        await generator_of(fakes).generate(PROMPT, ENDLESS, request_id="r", seconds=0.2)


async def test_an_engine_that_gives_no_token_is_an_error_with_a_partial_too(fakes: FakeFleet) -> None:
    await fakes.fleet.engines[0].client.pause("in_place")
    asking = generator_of(fakes).generate(PROMPT, ENDLESS, request_id="r", seconds=0.2, return_partial=asyncio.Event())
    asked = asyncio.create_task(asking)
    await fakes.until(lambda: "/abort_request" in fakes.fake(0).calls)
    fakes.fake(0).die()
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await asked


async def test_a_group_is_continued_lease_after_lease_until_it_is_whole(
    fakes: FakeFleet, encoder: PromptEncoder
) -> None:
    for engine in (fakes.fake(0), fakes.fake(1)):
        engine.token_seconds = 0.012
    group = group_of(fakes, encoder, SamplingParams(max_new_tokens=100), seconds=0.5)
    leased, releases = lease(0), 0
    while isinstance(result := await group.sample(leased, asyncio.Event()), buffer_pb2.LeaseRelease):
        releases += 1
        before = sum(p.envelope.response_tokens for p in leased.partial_samples)
        assert sum(p.envelope.response_tokens for p in result.partial_samples) > before
        leased = lease(0)
        leased.partial_samples.extend(result.partial_samples)
    assert releases >= 2
    prompt = encoder.encode_text("hello").tokens
    for packed in result.samples:
        sample = Sample.unpack(packed)
        assert (sample.status, sample.tokens.tolist()) == (Status.TRUNCATED, [*prompt, *response_to(prompt, 100)])


async def test_samples_without_a_new_token_fail_and_are_not_released_for_ever(
    fakes: FakeFleet, encoder: PromptEncoder
) -> None:
    group = group_of(fakes, encoder, ENDLESS, seconds=0.5)
    first = await group.sample(lease(0), asyncio.Event())
    assert isinstance(first, buffer_pb2.LeaseRelease)
    stuck = lease(0)
    stuck.partial_samples.extend(first.partial_samples)
    for number in (0, 1):
        fakes.fake(number).faults["/generate"] = "refuse_for_now"
    put = await group.sample(stuck, asyncio.Event())
    assert isinstance(put, buffer_pb2.GroupPut)
    assert (put.outcome, put.failure.reason) == (buffer_pb2.PUT_OUTCOME_FAILED, "DEADLINE_EXCEEDED")
    assert "none of its group's samples had a new token" in put.failure.message


async def test_samples_whose_tokens_grow_too_old_again_and_again_fail_with_the_way_out(
    fakes: FakeFleet, encoder: PromptEncoder
) -> None:
    group = group_of(fakes, encoder, ENDLESS, seconds=0.5, max_staleness=1)
    first = await group.sample(lease(0, policy_version=0), asyncio.Event())
    assert isinstance(first, buffer_pb2.LeaseRelease)
    later = lease(0, policy_version=5)
    later.partial_samples.extend(first.partial_samples)
    put = await group.sample(later, asyncio.Event())
    assert isinstance(put, buffer_pb2.GroupPut)
    assert put.outcome == buffer_pb2.PUT_OUTCOME_FAILED
    assert "raise --generate-timeout-seconds or --max-staleness" in put.failure.message
