"""Requests of every form to real engines behind the real router: checks over a `Stack`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import InvalidArgument
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator, StopStrings, request_ender
from services.rollout.production.prompts import PromptEncoder
from tests.support.engine_stack import PROMPT, Stack

_FITTING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"json_schema": '{"enum": ["red", "green", 7]}'}, '"red"|"green"|7'),
    (
        {"json_schema": '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}'},
        r"\[\s*(true|false)\s*,\s*(true|false)\s*\]",
    ),
    ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
)
_BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"json_schema": '{"type": "strin"}'}, "Unsupported type"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems would be ignored"),
    ({"json_schema": '{"$ref": "#"}'}, "cannot follow this json_schema or regex"),
    ({"regex": "("}, "parenthesis is not closed"),
)


async def a_stop_string_ends_the_response_with_the_token_in_which_it_is_complete(stack: Stack) -> None:
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


async def a_response_that_is_cut_anywhere_ends_at_its_stop_string_all_the_same(stack: Stack) -> None:
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


async def a_response_fits_its_json_schema_or_regex(stack: Stack) -> None:
    encoder = PromptEncoder(stack.checkpoint, apply_chat_template=False)
    for number, (constraint, fits) in enumerate(_FITTING):
        params = SamplingParams(max_new_tokens=400, seed=3, **constraint)
        made = await stack.generator.generate(PROMPT, params, request_id=f"fits-{number}", seconds=240)
        assert re.fullmatch(fits, encoder.decode(made.tokens)), encoder.decode(made.tokens)
        assert made.finish is Finish.STOP


async def a_bad_schema_is_the_callers_error_and_no_engine_is_suspected(stack: Stack) -> None:
    for number, (constraint, said) in enumerate(_BAD):
        params = SamplingParams(max_new_tokens=30, **constraint)
        with pytest.raises(InvalidArgument, match=said):
            await stack.generator.generate(PROMPT, params, request_id=f"bad-{number}", seconds=240)
        with pytest.raises(InvalidArgument, match=said):
            await anext(stack.generator.stream(PROMPT, params, request_id=f"bad-streamed-{number}", seconds=240))
    assert [(engine.is_suspect, engine.bad_answers) for engine in stack.fleet.engines] == [(False, 0), (False, 0)]


async def at_its_time_limit_a_response_comes_back_with_its_tokens_and_the_engines_are_free(stack: Stack) -> None:
    params = SamplingParams(max_new_tokens=2000, min_new_tokens=2000)
    async with EngineClient(stack.router.url) as client:
        generator = Generator(client, stack.fleet.weights, end_request=request_ender(lambda: stack.fleet.engines))
        partial = await generator.generate(
            PROMPT, params, request_id="late", seconds=1.5, return_partial=asyncio.Event()
        )
    assert partial.finish is Finish.ABORT
    assert 0 < len(partial.tokens) == len(partial.log_probs) == partial.policy_ranges[-1].end
    async with asyncio.timeout(60):
        for engine in stack.fleet.engines:
            while (await engine.client.load(seconds=60)).running:  # the engine's account of itself, a moment later
                await asyncio.sleep(0.05)


REQUESTS: tuple[Callable[[Stack], Awaitable[None]], ...] = (
    a_stop_string_ends_the_response_with_the_token_in_which_it_is_complete,
    a_response_that_is_cut_anywhere_ends_at_its_stop_string_all_the_same,
    a_response_fits_its_json_schema_or_regex,
    a_bad_schema_is_the_callers_error_and_no_engine_is_suspected,
    at_its_time_limit_a_response_comes_back_with_its_tokens_and_the_engines_are_free,
)
