"""A response of several requests is the one that a single request would have made, wherever it was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.rollout.engine.api import NOTHING_YET, Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator, StopStrings, Texts
from tests.support.fakes.fake_engine import FakeEngine, response_to
from tests.support.fakes.fake_fleet import FakeFleet

PROMPT = (1, 2, 3)
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


async def test_a_stop_string_that_has_begun_makes_the_next_request_short(
    generator: Generator, engine: FakeEngine
) -> None:
    """Else the engine, which does not see it, would go on to the longest response."""
    params = SamplingParams(40, stop=(_stop_at(30, 4),))
    length = len((await generator.generate(PROMPT, params, request_id="whole", seconds=60)).tokens)
    engine.aborted_after = {"cut#1": length - 1}
    made = engine.num_tokens
    await generator.generate(PROMPT, params, request_id="cut", seconds=60)
    window = TEXTS.num_tokens(params.stop[0])
    assert engine.bodies[-1]["sampling_params"]["max_new_tokens"] == window
    assert engine.num_tokens - made <= length + window


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
