from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import InvalidArgument
from headrace.job.schema.production import ContextLimit
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import NOTHING_YET, Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator, StopStrings, Texts, request_ender
from services.rollout.production.groups import GroupSampler
from services.rollout.production.partial import PartialRollout
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler
from tests.support.fakes.fake_engine import FakeEngine, Fault, response_to
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.fakes.memory_ledger import lease
from tests.support.models.tiny_model import make_tiny_tokenizer

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


_PIECES = (b"a", b"b", b"ab", "é".encode()[:1], "é".encode()[1:], b" ")
TEXTS = Texts(
    decode=lambda tokens: b"".join(_PIECES[token % len(_PIECES)] for token in tokens).decode(errors="replace"),
    num_tokens=lambda text: len(text.encode()),
)
WHOLE = response_to(PROMPT, 60)


@pytest.fixture
def engine(fakes: FakeFleet) -> FakeEngine:
    fakes.fake(0).texts = TEXTS
    return fakes.fake(0)


@pytest.fixture
def generator(fakes: FakeFleet, engine: FakeEngine) -> Generator:
    return Generator(fakes.fleet.engines[0].client, fakes.fleet.weights, stop_strings=StopStrings(lambda: TEXTS))


def _stop_at(length: int, num_tokens: int) -> str:
    return TEXTS.decode(WHOLE[length - num_tokens : length])


async def _broken_everywhere(
    generator: Generator, engine: FakeEngine, params: SamplingParams, whole: Generation, *, streaming: bool
) -> None:
    async def broken(name: str) -> Generation:
        if streaming:
            return [s async for s in generator.stream(PROMPT, params, request_id=name, seconds=60)][-1]
        return await generator.generate(PROMPT, params, request_id=name, seconds=60)

    seconds = (0,) if streaming else (0, 1)  # the tokens of a second request, if it is aborted, too
    names = {f"{streaming}-{first}-{second}-": (first, second) for first in range(1, 41) for second in seconds}
    for name, (first, second) in names.items():
        engine.aborted_after |= {f"{name}#1": first} | ({f"{name}#2": second} if second else {})
    for name, found in zip(names, await asyncio.gather(*map(broken, names)), strict=True):
        assert (name, found.tokens, found.finish) == (name, whole.tokens, whole.finish)
        assert found.log_probs == whole.log_probs
        assert found.policy_ranges[-1].end == len(whole.tokens)


_ASKED = {
    "long": SamplingParams(40, stop=(_stop_at(30, 4),)),
    "several": SamplingParams(40, stop=(_stop_at(25, 7), "never", _stop_at(33, 2))),
    "character": SamplingParams(40, stop=("é",)),
    "blank": SamplingParams(40, stop=(" b",), min_new_tokens=20),
    "both": SamplingParams(40, stop=("never",), stop_token_ids=(WHOLE[17], WHOLE[30])),
    "token": SamplingParams(40, stop_token_ids=(WHOLE[22],)),
    "none": SamplingParams(40),
}


@pytest.mark.parametrize(
    ("asked", "streaming"), [*((name, False) for name in _ASKED), ("several", True), ("token", True)]
)
async def test_wherever_it_is_cut_it_ends_as_an_unbroken_one(
    generator: Generator, engine: FakeEngine, asked: str, streaming: bool
) -> None:
    params = _ASKED[asked]
    whole = await generator.generate(PROMPT, params, request_id="whole", seconds=60)
    assert list(whole.tokens) == WHOLE[: len(whole.tokens)]
    assert whole.finish is (Finish.STOP if len(whole.tokens) < 40 else Finish.LENGTH)
    await _broken_everywhere(generator, engine, params, whole, streaming=streaming)


async def test_a_response_that_was_begun_elsewhere_ends_in_its_first_tokens(
    generator: Generator, engine: FakeEngine
) -> None:
    params = SamplingParams(40, stop=(_stop_at(30, 4),))
    whole = await generator.generate(PROMPT, params, request_id="whole", seconds=60)
    for length in range(1, len(whole.tokens) + 1):
        begun = replace(whole.until(length, len(PROMPT), Finish.ABORT), finish=Finish.ABORT)
        num_requests = len(engine.bodies)
        found = await generator.generate(PROMPT, params, request_id=f"b{length}", seconds=60, begun=begun)
        assert (found.tokens, found.finish) == (whole.tokens, Finish.STOP)
        if length == len(whole.tokens):
            assert len(engine.bodies) == num_requests, "it had ended"


async def test_an_end_of_sequence_in_the_step_of_an_abort_ends_the_response(fakes: FakeFleet) -> None:
    """SGLang says abort, and does not look at the token: the policy would have been asked to go on after its end."""
    texts = replace(TEXTS, end_tokens=frozenset({WHOLE[9]}))
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights, stop_strings=StopStrings(lambda: texts))
    fakes.fake(0).aborted_after = {"r#1": 10}
    found = await generator.generate(PROMPT, SamplingParams(40), request_id="r", seconds=60)
    assert (list(found.tokens), found.finish) == (WHOLE[:10], Finish.STOP)
    assert len(fakes.fake(0).bodies) == 1


def test_a_response_that_is_cut_has_the_experts_and_ranges_of_its_tokens() -> None:
    tokens: Sequence[int] = WHOLE[:6]
    experts = bytes(range(4 * (len(PROMPT) + 6 - 1)))
    whole = replace(NOTHING_YET, tokens=tuple(tokens), log_probs=(-1.0,) * 6, routed_experts=experts)
    cut = whole.until(4, len(PROMPT), Finish.STOP)
    assert (cut.tokens, cut.finish, len(cut.log_probs)) == (tuple(tokens[:4]), Finish.STOP, 4)
    assert cut.routed_experts == experts[: 4 * (len(PROMPT) + 4 - 1)]


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
