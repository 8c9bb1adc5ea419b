"""One response, whatever engines do meanwhile: it is continued from its tokens when an engine dies or aborts it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from headrace.errors import DeadlineExceeded, Unavailable
from services.rollout.engine.api import NOTHING_YET, Finish, Generation, SamplingParams
from services.rollout.engine.client import EngineClient

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 2.0


class Generator:
    """Asks the router. `served_version` keeps the prefix caches of different weights apart."""

    def __init__(self, router: EngineClient, served_version: Callable[[], int]) -> None:
        self._router = router
        self._served_version = served_version

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        seconds: float,
        begun: Generation = NOTHING_YET,
        hand_back: asyncio.Event | None = None,
    ) -> Generation:
        """A finished response. Raises Unavailable or DeadlineExceeded when no engine made it within `seconds`.

        With `hand_back` it is not continued after an abort: the tokens so far come back with finish ABORT, and the
        event is set for all who share it; when somebody else sets it, the next pause in the generation is the end.
        """
        pieces = self._pieces(prompt, params, begun, hand_back, request_id=request_id, seconds=seconds, streaming=False)
        return [piece async for piece in pieces][-1]

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, seconds: float
    ) -> AsyncIterator[Generation]:
        """All tokens so far, again and again; the last one has a `finish` of stop or length."""
        return self._pieces(prompt, params, NOTHING_YET, None, request_id=request_id, seconds=seconds, streaming=True)

    async def _pieces(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        begun: Generation,
        hand_back: asyncio.Event | None,
        *,
        request_id: str,
        seconds: float,
        streaming: bool,
    ) -> AsyncIterator[Generation]:
        end = time.monotonic() + seconds
        done = begun
        if len(done.tokens) >= params.max_new_tokens:
            yield replace(done, finish=Finish.LENGTH)
            return
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        attempt = 0
        while (left := end - time.monotonic()) > 0:
            if hand_back and hand_back.is_set():
                yield done
                return
            attempt += 1
            rest = replace(params, max_new_tokens=params.max_new_tokens - len(done.tokens))
            so_far = done
            try:
                async for piece in self._ask([*prompt, *done.tokens], rest, f"{request_id}#{attempt}", left, streaming):
                    so_far = done.then(piece)
                    yield so_far
            except Unavailable as error:
                if end - time.monotonic() <= backoff_seconds:
                    raise
                failure: Unavailable | None = error
            else:
                failure = None
                if so_far.finish is not None and so_far.finish.is_final:
                    return
            if failure is None and len(so_far.tokens) > len(done.tokens):
                backoff_seconds = _FIRST_BACKOFF_SECONDS
            done = replace(so_far, finish=Finish.ABORT)
            if len(done.tokens) >= params.max_new_tokens:
                yield replace(done, finish=Finish.LENGTH)
                return
            if hand_back and failure is None and len(done.tokens) > len(begun.tokens):
                hand_back.set()
            await _set_within(hand_back, backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, _LONGEST_BACKOFF_SECONDS)
        raise DeadlineExceeded(f"request {request_id} had {len(done.tokens)} tokens after {seconds:g} s")

    async def _ask(
        self, tokens: list[int], params: SamplingParams, request_id: str, seconds: float, streaming: bool
    ) -> AsyncIterator[Generation]:
        cache_key = f"v{self._served_version()}"
        if not streaming:
            yield await self._router.generate(
                tokens, params, request_id=request_id, cache_key=cache_key, seconds=seconds
            )
            return
        async for piece in self._router.stream(
            tokens, params, request_id=request_id, cache_key=cache_key, seconds=seconds
        ):
            yield piece


async def _set_within(event: asyncio.Event | None, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (event or asyncio.Event()).wait()
