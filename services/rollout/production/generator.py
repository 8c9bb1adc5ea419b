"""Generates one response: when an engine dies or aborts, the response is continued from its tokens.

After a bad response the request is repeated and the engine is suspected. Tokens of weights whose publication is not
committed yet are held back until it is; those of refused weights are cut off and sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from headrace.job.model.context_limit import ContextLimit
from services.rollout.engine.activity import Activity
from services.rollout.engine.answers.bad_answer import BadAnswer
from services.rollout.engine.answers.response import EngineResponse, Finish
from services.rollout.engine.api import NOTHING_YET, Generation, PromptImages, SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.time_limit import GRACE_SECONDS, EndRequest, ended_after

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 2.0


class Generator:
    """Asks the router. `suspect` is called with every bad response, `end_request` at the time limit of a partial."""

    def __init__(
        self,
        router: EngineClient,
        weights: ServedWeights,
        suspect: Callable[[BadAnswer], None] = lambda _: None,
        *,
        context: ContextLimit | None = None,
        activity: Activity | None = None,
        end_request: EndRequest | None = None,
        has_grammars: bool = True,
    ) -> None:
        """Without `has_grammars`, engines can follow neither a JSON schema nor a regular expression."""
        self._has_grammars = has_grammars
        self._end_request = end_request
        self._router = router
        self._weights = weights
        self._suspect = suspect
        self._context = context
        self._activity = activity or Activity(0)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        seconds: float,
        begun: Generation = NOTHING_YET,
        return_partial: asyncio.Event | None = None,
        priority: int | None = None,
        images: PromptImages | None = None,
        routing_key: str | None = None,
    ) -> Generation:
        """Returns a finished response. Requests of one `routing_key` go to one engine, whose prefix cache they share.

        Raises Unavailable or DeadlineExceeded when there is none within `seconds`.

        With `return_partial` it is not continued after an abort: the tokens so far are returned with finish ABORT, and
        the event is set for all who share it; when another sets it, generation ends at its next interruption. After
        `seconds` the tokens so far are returned in the same way, if there are any, and the event is not set.
        """
        pieces = self._pieces(
            *(prompt, params, begun, return_partial),
            request_id=request_id,
            seconds=seconds,
            streaming=False,
            priority=priority,
            images=images,
            routing_key=routing_key,
        )
        return [piece async for piece in pieces][-1]

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        seconds: float,
        images: PromptImages | None = None,
        begun: Generation = NOTHING_YET,
        routing_key: str | None = None,
    ) -> AsyncGenerator[Generation, None]:
        """Yields all tokens so far, again and again; the last one has a `finish` of stop or length."""
        return self._pieces(
            *(prompt, params, begun, None),
            request_id=request_id,
            seconds=seconds,
            streaming=True,
            images=images,
            routing_key=routing_key,
        )

    def _fitting(self, num_tokens: int, params: SamplingParams) -> SamplingParams:
        """Raises InvalidArgument for a request that no engine could serve, so that no engine is blamed."""
        if params.is_constrained and not self._has_grammars:
            raise InvalidArgument(
                "engines follow no json_schema or regex: the job says --sglang-grammar-backend none",
                reason="NO_GRAMMARS",
                field="sampling",
            )
        if self._context is None:
            return params
        if num_tokens >= self._context.tokens:
            raise InvalidArgument(self._context.too_long(num_tokens), reason="PROMPT_TOO_LONG")
        return replace(params, max_new_tokens=min(params.max_new_tokens, self._context.tokens - num_tokens))

    async def _pieces(  # noqa: C901  # one branch a kind of answer
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        begun: Generation,
        return_partial: asyncio.Event | None,
        *,
        request_id: str,
        seconds: float,
        streaming: bool,
        priority: int | None = None,
        images: PromptImages | None = None,
        routing_key: str | None = None,
    ) -> AsyncGenerator[Generation, None]:
        end = time.monotonic() + seconds
        params = self._fitting(len(prompt), params)
        done = begun
        if len(done.tokens) >= params.max_new_tokens:
            yield replace(done, finish=Finish.LENGTH)
            return
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        attempt = 0
        while (left := end - time.monotonic()) > 0:
            if return_partial and return_partial.is_set():
                yield done
                return
            attempt += 1
            rest = params.after(len(done.tokens))
            so_far = done
            failure: Unavailable | DeadlineExceeded | None = None
            try:
                pieces = self._ask(
                    *([*prompt, *done.tokens], rest, f"{request_id}#{attempt}", left, streaming, priority, images),
                    returns_partial=return_partial is not None,
                    routing_key=routing_key,
                )
                async with contextlib.aclosing(pieces), _of_grammar(params):
                    async for piece in pieces:
                        if streaming and len(done.tokens) + len(piece.tokens) < len(so_far.tokens):
                            raise Unavailable(
                                "the weights were withdrawn: send the request again", reason="WEIGHTS_REFUSED"
                            )
                        so_far = done.then(piece)
                        yield so_far
            except BadAnswer as error:
                self._suspect(error)
                failure = error
            except (InvalidArgument, FailedPrecondition) as error:
                if not params.is_constrained:
                    self._suspect(BadAnswer("refused", error.message))  # it may refuse whatever it is asked
                raise
            except (Unavailable, DeadlineExceeded) as error:
                failure = error
            else:
                if so_far.finish is not None and so_far.finish.is_final:
                    return
            is_over = end - time.monotonic() <= backoff_seconds
            if failure is not None and is_over and (return_partial is None or not so_far.tokens):
                raise failure
            if failure is None and len(so_far.tokens) > len(done.tokens):
                backoff_seconds = _FIRST_BACKOFF_SECONDS
            done = _continuable(so_far, params, streaming=streaming)
            if len(done.tokens) >= params.max_new_tokens:
                yield replace(done, finish=Finish.LENGTH)
                return
            if return_partial and failure is None and len(done.tokens) > len(begun.tokens) and time.monotonic() < end:
                return_partial.set()
            await _set_within(return_partial, min(backoff_seconds, max(end - time.monotonic(), 0.0)))
            backoff_seconds = min(backoff_seconds * 2, _LONGEST_BACKOFF_SECONDS)
        if return_partial is None or not done.tokens:
            raise DeadlineExceeded(f"request {request_id} had {len(done.tokens)} tokens after {seconds:g} s")
        yield done

    async def _ask(
        self,
        tokens: list[int],
        params: SamplingParams,
        request_id: str,
        seconds: float,
        streaming: bool,
        priority: int | None,
        images: PromptImages | None,
        *,
        returns_partial: bool = False,
        routing_key: str | None = None,
    ) -> AsyncGenerator[Generation, None]:
        ending: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if returns_partial and self._end_request:
            ending = ended_after(seconds, request_id, self._end_request)
            seconds += GRACE_SECONDS
        end = time.monotonic() + seconds
        cache_key = self._weights.cache_key
        if not streaming:
            with self._activity.requests():
                async with ending:
                    answer = await self._router.generate(
                        tokens,
                        params,
                        request_id=request_id,
                        cache_key=cache_key,
                        seconds=seconds,
                        priority=priority,
                        images=images,
                        routing_key=routing_key,
                    )
            yield await self._accepted(answer, len(tokens), end)
            return
        answers = self._router.stream(
            tokens,
            params,
            request_id=request_id,
            cache_key=cache_key,
            seconds=seconds,
            images=images,
            routing_key=routing_key,
        )
        async with contextlib.aclosing(answers):
            with self._activity.requests():
                async for answer in answers:
                    generation = await self._accepted(answer, len(tokens), end)
                    yield generation
                    if len(generation.tokens) < len(answer.tokens):
                        return  # what follows was made after tokens of refused weights

    async def _accepted(self, answer: EngineResponse, num_prompt_tokens: int, end: float) -> Generation:
        """Returns the part of the response from accepted weights, once every verdict on its weights exists."""
        try:
            async with asyncio.timeout(end - time.monotonic()):
                ranges = await self._weights.ranges_of(answer.spans)
        except TimeoutError as error:
            raise DeadlineExceeded("its weights were neither committed nor refused in time") from error
        return Generation.of(answer, ranges, num_prompt_tokens)


def _continuable(so_far: Generation, params: SamplingParams, *, streaming: bool) -> Generation:
    """Returns what the next request continues. Raises Unavailable where the reader has tokens that it cannot."""
    if not params.is_constrained:
        return replace(so_far, finish=Finish.ABORT)
    if streaming and so_far.tokens:
        raise Unavailable(
            "an engine was interrupted, and a response that follows a json_schema or regex cannot be continued: send "
            "the request again",
            reason="CANNOT_CONTINUE",
        )
    return NOTHING_YET


@contextlib.asynccontextmanager
async def _of_grammar(params: SamplingParams) -> AsyncGenerator[None, None]:
    """Makes an engine's failure over a caller's grammar the caller's error: another engine would fail, too.

    A grammar that allows no token at all, as `{"$ref": "#"}`, has log-probs that are no numbers in a stream.
    """
    try:
        yield
    except Unavailable as error:
        allows_no_token = isinstance(error, BadAnswer) and error.kind == "log_prob"
        if params.is_constrained and (allows_no_token or "grammar" in error.message.lower()):
            raise InvalidArgument(
                f"the engine cannot follow this json_schema or regex: {error.message}",
                reason="GRAMMAR_FAILED",
                field="sampling",
            ) from error
        raise


async def _set_within(event: asyncio.Event | None, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (event or asyncio.Event()).wait()
