"""One response, whatever engines do meanwhile: it is continued from its tokens when an engine dies or aborts it."""

from __future__ import annotations

import asyncio
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
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, seconds: float
    ) -> Generation:
        """A finished response. Raises Unavailable or DeadlineExceeded when no engine made it within `seconds`."""
        pieces = self._pieces(prompt, params, request_id=request_id, seconds=seconds, streaming=False)
        return [piece async for piece in pieces][-1]

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, seconds: float
    ) -> AsyncIterator[Generation]:
        """All tokens so far, again and again; the last one has a `finish` of stop or length."""
        return self._pieces(prompt, params, request_id=request_id, seconds=seconds, streaming=True)

    async def _pieces(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, seconds: float, streaming: bool
    ) -> AsyncIterator[Generation]:
        end = time.monotonic() + seconds
        done = NOTHING_YET
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        attempt = 0
        while (left := end - time.monotonic()) > 0:
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
            await asyncio.sleep(backoff_seconds)
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
