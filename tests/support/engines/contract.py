"""What headrace counts on in an engine, as checks that run on SGLang and on the fake that stands for it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import pytest

from headrace.errors import FailedPrecondition, InvalidArgument
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Engine, EngineState
from services.rollout.engine.replies import EngineResponse, Finish
from services.rollout.engine.weights import ServedWeights

PROMPT = (1, 45, 67, 89, 2)
SECONDS = 240.0
_NO_STOP = SamplingParams(max_new_tokens=120)


@dataclass(frozen=True)
class EngineUnderTest:
    """One engine of a fleet, and the names that the fleet knows."""

    engine: Engine
    weights: ServedWeights

    @property
    def client(self) -> EngineClient:
        return self.engine.client

    async def rename(self) -> str:
        """The same weights under a new name, as the fleet would be told of it."""
        name = self.weights.new_name(self.weights.policy_version, self.engine.engine_id)
        before, self.engine.state = self.engine.state, EngineState.UPDATING  # the fleet would miss the name it knows
        self.engine.weights_name = name
        self.weights.accept([name])
        await self.client.name_weights(name)
        self.engine.state = before
        return name

    async def ask(self, request_id: str, params: SamplingParams = _NO_STOP) -> EngineResponse:
        return await self.client.generate(PROMPT, params, request_id=request_id, cache_key="c", seconds=SECONDS)


def _stream(
    it: EngineUnderTest, request_id: str, params: SamplingParams = _NO_STOP
) -> AsyncGenerator[EngineResponse, None]:
    return it.client.stream(PROMPT, params, request_id=request_id, cache_key="c", seconds=SECONDS)


async def _begun(it: EngineUnderTest, name: str) -> tuple[AsyncGenerator[EngineResponse, None], EngineResponse]:
    """A request in flight and its first tokens; one that ended with them is asked again."""
    for attempt in range(100):
        stream = _stream(it, f"{name}-{attempt}")
        async for answer in stream:
            if answer.finish is None and answer.tokens:
                return stream, answer
    raise AssertionError("every request ended with its first tokens")


async def _renamed_in_flight(
    it: EngineUnderTest, pause_mode: Literal["in_place", "abort"]
) -> tuple[str, str, list[EngineResponse]]:
    """Both names, and the answers of a request that was in flight when the engine paused; others are asked again."""
    for attempt in range(20):
        old = await it.rename()
        stream, first = await _begun(it, f"{pause_mode}-{attempt}")
        async with contextlib.aclosing(stream):
            await it.client.pause(pause_mode)
            new = await it.rename()
            await it.client.resume()
            answers = [first, *[answer async for answer in stream]]
        if answers[-1].finish is Finish.ABORT or len(answers[-1].spans) > 1:
            break
    return old, new, answers


async def a_whole_answer_has_as_many_tokens_log_probs_and_named_tokens(it: EngineUnderTest) -> None:
    name = await it.rename()
    answer = await it.ask("whole", SamplingParams(max_new_tokens=8))
    assert 1 <= len(answer.tokens) == len(answer.log_probs) <= 8
    assert answer.finish in (Finish.STOP, Finish.LENGTH)
    assert [(span.name, span.start, span.end) for span in answer.spans] == [(name, 0, len(answer.tokens))]
    assert await it.client.weights_name() == name
    counts = answer.counts
    assert (counts.prompt_tokens, counts.completion_tokens) == (len(PROMPT), len(answer.tokens))
    assert 0 <= counts.cached_tokens < len(PROMPT)
    assert counts.verifications == 0


async def a_stream_grows_while_it_is_made(it: EngineUnderTest) -> None:
    name = await it.rename()
    answers = [answer async for answer in _stream(it, "grows", SamplingParams(max_new_tokens=24))]
    growing = [answer for answer in answers if answer.tokens]
    assert len(answers[-1].tokens) == 1 or len(growing) > 1
    for one, other in pairwise(growing):
        assert other.tokens[: len(one.tokens)] == one.tokens
        assert other.log_probs[: len(one.log_probs)] == pytest.approx(one.log_probs)
    assert {span.name for answer in growing for span in answer.spans} == {name}
    assert [answer.finish is None for answer in answers] == [True] * (len(answers) - 1) + [False]


async def tokens_on_both_sides_of_a_new_name_bear_their_own(it: EngineUnderTest) -> None:
    old, new, answers = await _renamed_in_flight(it, "in_place")
    assert {span.name for answer in answers[:-1] for span in answer.spans} == {old}
    assert [span.name for span in answers[-1].spans] == [old, new]
    assert answers[-1].spans[0].end == answers[-1].spans[1].start >= len(answers[0].tokens)
    assert answers[-1].spans[1].end == len(answers[-1].tokens)


async def an_idle_engine_gives_its_memory_up_and_requests_wait_until_it_has_it_back(it: EngineUnderTest) -> None:
    for attempt in range(20):  # a request may end before the engine hears of it
        stream, _ = await _begun(it, f"released-{attempt}")
        async with contextlib.aclosing(stream):
            await it.client.pause("abort")
            *_, last = [answer async for answer in stream]
        if last.finish is Finish.ABORT:
            break
        await it.client.resume()
    assert last.finish is Finish.ABORT
    while not await it.client.flush_cache():  # another party's state
        await asyncio.sleep(0.01)
    await it.client.release_memory(seconds=SECONDS)
    waiting = asyncio.create_task(it.ask("waiting", SamplingParams(max_new_tokens=4)))
    assert await it.client.weights_name() == it.engine.weights_name, "it answers that it lives"
    await it.client.resume_memory(seconds=SECONDS)
    assert not waiting.done()
    await it.client.resume()
    assert (await waiting).tokens


async def an_aborting_pause_ends_requests_with_their_tokens(it: EngineUnderTest) -> None:
    old, _, answers = await _renamed_in_flight(it, "abort")
    assert answers[-1].finish is Finish.ABORT
    assert [span.name for span in answers[-1].spans] == [old]
    assert len(answers[-1].tokens) == len(answers[-1].log_probs) >= len(answers[0].tokens) > 0


async def what_is_aborted_answers_with_its_tokens(it: EngineUnderTest) -> None:
    for attempt in range(20):  # a request may end before the engine hears of it
        stream, first = await _begun(it, f"aborted-{attempt}")
        async with contextlib.aclosing(stream):
            await it.client.abort_all()
            last = [answer async for answer in stream][-1]
        if last.finish is Finish.ABORT:
            break
    assert last.finish is Finish.ABORT
    assert last.tokens[: len(first.tokens)] == first.tokens


async def scores_are_log_probs_of_all_tokens_but_the_first(it: EngineUnderTest) -> None:
    answer = await it.ask("scored", SamplingParams(max_new_tokens=8))
    whole = [*PROMPT, *answer.tokens]
    scores = await it.client.score(whole, cache_key="c", seconds=SECONDS)
    assert len(scores) == len(whole) - 1
    assert scores[len(PROMPT) - 1 :] == pytest.approx(answer.log_probs, abs=1e-4)


async def prefixes_are_not_forgotten_beside_requests(it: EngineUnderTest) -> None:
    for attempt in range(20):  # a request may end before the engine is asked to forget
        stream, _ = await _begun(it, f"flushed-{attempt}")
        async with contextlib.aclosing(stream):
            has_flushed = await it.client.flush_cache()
            await it.client.abort_all()
            ends = [answer.finish async for answer in stream]
        if not has_flushed:
            break
    assert not has_flushed
    assert ends[-1] is not None
    async with asyncio.timeout(60):
        while not await it.client.flush_cache():  # another party's state
            await asyncio.sleep(0.01)


async def garbage_collection_can_be_told_to_leave_what_is_there(it: EngineUnderTest) -> None:
    await it.client.freeze_gc()


async def its_requests_are_counted_until_they_end(it: EngineUnderTest) -> None:
    for attempt in range(20):  # a request may end before it is counted
        stream, _ = await _begun(it, f"counted-{attempt}")
        async with contextlib.aclosing(stream):
            for _ in range(20):  # it notes them a step or two later
                if counted := await it.client.num_requests():
                    break
            await it.client.abort_all()
            _ = [answer async for answer in stream]
        if counted:
            break
    assert counted > 0
    async with asyncio.timeout(60):
        while await it.client.num_requests():  # another party's state
            await asyncio.sleep(0.01)


async def checksums_are_of_all_tensors_but_the_skipped(it: EngineUnderTest) -> None:
    whole = await it.client.checksums()
    rest = await it.client.checksums(skipped=["layers.0."])
    assert rest == [{name: sum_ for name, sum_ in rank.items() if "layers.0." not in name} for rank in whole]


async def a_folder_without_weights_is_refused_and_changes_nothing(it: EngineUnderTest) -> None:
    before = await it.client.checksums()
    with tempfile.TemporaryDirectory() as folder, pytest.raises((FailedPrecondition, InvalidArgument)):
        await it.client.load_folder(folder, seconds=SECONDS)
    assert await it.client.checksums() == before


async def a_group_that_it_is_not_in_cannot_be_left(it: EngineUnderTest) -> None:
    with pytest.raises((FailedPrecondition, InvalidArgument)):
        await it.client.leave_group("nobody's")


CONTRACT: Mapping[str, Callable[[EngineUnderTest], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        a_whole_answer_has_as_many_tokens_log_probs_and_named_tokens,
        a_stream_grows_while_it_is_made,
        tokens_on_both_sides_of_a_new_name_bear_their_own,
        an_aborting_pause_ends_requests_with_their_tokens,
        an_idle_engine_gives_its_memory_up_and_requests_wait_until_it_has_it_back,
        what_is_aborted_answers_with_its_tokens,
        scores_are_log_probs_of_all_tokens_but_the_first,
        garbage_collection_can_be_told_to_leave_what_is_there,
        prefixes_are_not_forgotten_beside_requests,
        its_requests_are_counted_until_they_end,
        checksums_are_of_all_tensors_but_the_skipped,
        a_folder_without_weights_is_refused_and_changes_nothing,
        a_group_that_it_is_not_in_cannot_be_left,
    )
}
