from __future__ import annotations

import asyncio

import pytest

from headrace.errors import InvalidArgument, Unavailable
from headrace.job.schema.production import ContextLimit
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineState
from services.rollout.engine.replies import Finish
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.generator import Generator
from tests.support.fakes.fake_engine import FakeEngine, Fault, response_to
from tests.support.fakes.fake_fleet import FakeFleet

PROMPT = (1, 2, 3)
PARAMS = SamplingParams(max_new_tokens=60)


async def test_an_aborted_request_is_continued_from_its_tokens(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    generator = Generator(engine.client, fakes.fleet.weights)
    pieces: list[Generation] = []
    async for piece in generator.stream(PROMPT, PARAMS, request_id="r", seconds=60):
        pieces.append(piece)
        if len(pieces) == 5:
            await engine.client.pause("abort")
            await fakes.name_weights(0, 1)
            await engine.client.resume()
    assert list(pieces[-1].tokens) == response_to(PROMPT, 60)
    assert pieces[-1].finish is Finish.LENGTH
    first, second = pieces[-1].policy_ranges
    assert (first.policy_version, first.start, second.policy_version, second.end) == (0, 0, 1, 60)
    assert first.end == second.start >= 5
    assert pieces[-1].counts.completion_tokens == 60
    assert pieces[-1].counts.prompt_tokens == len(PROMPT) + len(PROMPT) + first.end, "each request sends its prompt"


async def test_mid_stream_has_tokens_of_the_first_weights_and_the_end_has_all(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    pieces: list[Generation] = []
    stream = Generator(engine.client, fakes.fleet.weights).stream(PROMPT, PARAMS, request_id="r", seconds=60)
    async for piece in stream:
        pieces.append(piece)
        if len(pieces) == 5:
            await engine.client.pause("in_place")
            await fakes.name_weights(0, 1)
            await engine.client.resume()
    assert [len(piece.tokens) for piece in pieces[:5]] == [1, 2, 3, 4, 5]
    assert {r.policy_version for piece in pieces[:-1] for r in piece.policy_ranges} == {0}
    assert list(pieces[-1].tokens) == response_to(PROMPT, 60)
    first, second = pieces[-1].policy_ranges
    assert (first.policy_version, second.policy_version, second.end) == (0, 1, 60)
    assert len(pieces[-2].tokens) <= first.end


async def test_what_no_engine_could_take_is_refused_without_asking_or_suspecting_one(fakes: FakeFleet) -> None:
    """A refusal of an engine made it suspect: one prompt that was too long, and it was sworn in anew."""
    generator = Generator(
        fakes.fleet.engines[0].client,
        fakes.fleet.weights,
        fakes.fleet.suspect,
        context=ContextLimit(8, "--sglang-context-length"),
    )
    with pytest.raises(InvalidArgument, match="has 9 tokens, which leaves no room .*: --sglang-context-length is 8"):
        await generator.generate(range(9), PARAMS, request_id="r", seconds=60)
    assert "/generate" not in fakes.fake(0).calls
    assert not fakes.fleet.engines[0].is_suspect
    short = await generator.generate(PROMPT, PARAMS, request_id="s", seconds=60)
    assert len(short.tokens) == 5


async def test_a_request_survives_its_engine(fakes: FakeFleet) -> None:
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights)
    fakes.fake(0).faults["/generate"] = "die"
    asking = asyncio.create_task(generator.generate(PROMPT, PARAMS, request_id="r", seconds=60))
    engine = fakes.fleet.engines[0]
    await fakes.until(lambda: engine.restarts == 1 and engine.state is EngineState.READY)
    asking.cancel()
    other = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights)
    assert list((await other.generate(PROMPT, PARAMS, request_id="r", seconds=60)).tokens) == response_to(PROMPT, 60)


async def test_when_no_engine_answers_in_time_the_error_says_so() -> None:
    engine = FakeEngine()
    async with EngineClient(engine.url) as client:
        with pytest.raises(Unavailable, match="Cannot connect to host"):
            await Generator(client, ServedWeights()).generate(PROMPT, PARAMS, request_id="r", seconds=0.5)


async def test_a_refused_request_is_not_tried_again(fakes: FakeFleet) -> None:
    fakes.fake(0).faults["/generate"] = "missing"
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights)
    with pytest.raises(InvalidArgument, match="answered 404"):
        await generator.generate(PROMPT, PARAMS, request_id="r", seconds=60)
    assert fakes.fake(0).calls.count("/generate") == 1


async def test_prefixes_of_different_weights_are_kept_apart(fakes: FakeFleet) -> None:
    await fakes.fleet.switch_to(17)
    await Generator(fakes.fleet.engines[0].client, fakes.fleet.weights).generate(
        PROMPT, PARAMS, request_id="r", seconds=60
    )
    assert fakes.fake(0).cache_keys == ["v17"]


SCHEMA = SamplingParams(max_new_tokens=60, json_schema='{"type":"object"}')


async def test_a_response_of_a_schema_begins_again_when_it_is_interrupted(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    asking = asyncio.create_task(
        Generator(engine.client, fakes.fleet.weights).generate(PROMPT, SCHEMA, request_id="r", seconds=60)
    )
    await fakes.until(lambda: fakes.fake(0).num_tokens > 5)
    await engine.client.abort_all()
    assert list((await asking).tokens) == response_to(PROMPT, 60)
    assert [body["input_ids"] for body in fakes.fake(0).bodies] == [list(PROMPT)] * 2


async def test_a_reader_of_a_response_of_a_schema_is_told_that_it_was_interrupted(fakes: FakeFleet) -> None:
    engine = fakes.fleet.engines[0]
    stream = Generator(engine.client, fakes.fleet.weights).stream(PROMPT, SCHEMA, request_id="r", seconds=60)
    assert (await anext(stream)).tokens
    await engine.client.abort_all()
    with pytest.raises(Unavailable, match="cannot be continued: send the request again"):
        [piece async for piece in stream]


async def test_engines_without_grammars_are_not_asked(fakes: FakeFleet) -> None:
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights, has_grammars=False)
    with pytest.raises(InvalidArgument, match="--sglang-grammar-backend none"):
        await generator.generate(PROMPT, SCHEMA, request_id="r", seconds=60)
    assert fakes.fake(0).bodies == []


async def test_a_grammar_that_an_engine_fails_over_is_the_callers_and_no_engine_is_suspected(fakes: FakeFleet) -> None:
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights, fakes.fleet.suspect)
    faults: tuple[Fault, ...] = ("grammar", "masked")
    for fault in faults:
        fakes.fake(0).faults["/generate"] = fault
        for params in (SCHEMA, SamplingParams(max_new_tokens=9, regex="a")):
            with pytest.raises(InvalidArgument, match="cannot follow this json_schema or regex"):
                await generator.generate(PROMPT, params, request_id="r", seconds=60)
    fakes.fake(0).faults["/generate"] = "missing"
    with pytest.raises(InvalidArgument):
        await generator.generate(PROMPT, SCHEMA, request_id="r", seconds=60)
    assert not any(engine.is_suspect for engine in fakes.fleet.engines)
