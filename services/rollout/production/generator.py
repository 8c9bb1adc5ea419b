"""Generates one response: when an engine dies or aborts, the response is continued from its tokens.

After a bad response the request is repeated and the engine is suspected. Tokens of weights whose publication is not
committed yet are held back until it is; those of refused weights are cut off and sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import DeadlineExceeded, FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.job.schema.production import ContextLimit
from headrace.models.tokenizer.tokenizer import end_tokens
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.rpc.retry import Backoff
from services.rollout.engine.api import NOTHING_YET, Generation, PromptImages, SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import Activity, Engine, EngineState
from services.rollout.engine.replies import BadAnswer, EngineResponse, Finish
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.constraint import of_grammar
from services.rollout.production.prompts import PromptEncoder


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """The properties that all requests for one response share."""

    request_id: str
    streaming: bool
    returns_partial: bool = False
    priority: int | None = None
    images: PromptImages | None = None
    routing_key: str | None = None
    sampling_mask: bool = False
    adapter: str = ""
    """One that engines hold; empty: what the run serves"""


@dataclass
class ResponseAttempt:
    """One request of several for a response: the tokens with those of the requests before it, and why it failed."""

    so_far: Generation
    asked_tokens: int
    """The length that the response has when the request is answered in full"""
    failure: Unavailable | DeadlineExceeded | None = None

    @property
    def is_final(self) -> bool:
        return self.failure is None and self.so_far.finish is not None and self.so_far.finish.is_final

    @property
    def is_answered_in_full(self) -> bool:
        return self.failure is None and len(self.so_far.tokens) == self.asked_tokens

    def require_another(self, *, has_time: bool, returns_partial: bool) -> None:
        """Raises the failure where no other attempt follows, unless there are tokens to return."""
        if self.failure is not None and not has_time and not (returns_partial and self.so_far.tokens):
            raise self.failure


# Finds the end of a response that several requests made, where an unbroken one would have ended.
# An engine looks for stop strings in the tokens of one request, and looks at no token of the step in which a request is
# aborted. The tokens around a resume point are examined here, in the way that SGLang examines them: a stop string ends
# the response at the first token after which it is in the text of the last tokens, one more than its longest stop
# string has.

OffLoop = Callable[..., Awaitable[Any]]

_UNSEEN_TOKENS = 64
"""The most that an engine samples in one step, by speculative decoding."""
_HALF_A_CHARACTER = "\ufffd"
# Beside the tokenizer's end of sequence, SGLang ends a response at these.
_END_TEXTS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokenizer's two directions, and the tokens that end every response."""

    decode: Callable[[Sequence[int]], str]
    num_tokens: Callable[[str], int]
    """The number of tokens of a text, without any that begin or end a sequence."""
    end_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A request's first token is at `start` of the response, whose first `examined` tokens do not end it."""

    start: int
    examined: int

    def is_near(self, stops: Sequence[str]) -> bool:
        """False where no stop string reaches from before it: no token is less than a byte, but for one before."""
        return self.start > 0 and any(self.examined <= self.start + len(stop.encode()) + 1 for stop in stops)


class StopStrings:
    """Knows only a request's stop tokens where it has no `texts`. `off_loop` runs what asks for and uses them."""

    def __init__(self, texts: Callable[[], Texts] | None = None, off_loop: OffLoop = asyncio.to_thread) -> None:
        self._texts = texts
        self._off_loop = off_loop

    @classmethod
    def of(cls, encoder: PromptEncoder, hf_checkpoint: Path) -> StopStrings:
        """Reads the checkpoint at the first resume point."""
        return cls(cache(lambda: texts_of(encoder.tokenizer, hf_checkpoint)), encoder.off_loop)

    async def length(self, response: Generation, params: SamplingParams, resume: ResumePoint) -> int | None:
        """Returns the length at which an unbroken response ends, or None if it goes on, or ended as it says."""
        if response.finish is Finish.ABORT or resume.is_near(params.stop):
            length: int | None = await self._off_loop(self._length, response, params, resume)
            return length
        return None

    async def next_request(self, params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
        """Returns what to ask for after these tokens: few tokens if they may end with the beginning of a stop string.

        An engine does not see that string, and would go on to the longest response.
        """
        rest = params.after(len(tokens))
        if not (tokens and params.stop and self._texts):
            return rest
        most = await self._off_loop(self._begun_stop, tokens, params)
        return rest.at_most(most) if most else rest

    def _length(self, response: Generation, params: SamplingParams, resume: ResumePoint) -> int | None:
        tokens, texts = response.tokens, self._texts() if self._texts else None
        window = _window(texts, params) if texts else 0
        end_tokens = {*params.stop_token_ids, *(texts.end_tokens if texts else ())}
        first_unseen = len(tokens) - _UNSEEN_TOKENS if response.finish is Finish.ABORT else len(tokens)
        for length in range(resume.examined + 1, len(tokens) + 1):
            is_unseen, crosses = length > first_unseen, resume.start > 0 and length < resume.start + window
            if is_unseen and tokens[length - 1] in end_tokens:
                return length
            if texts and window and (is_unseen or crosses):
                text = texts.decode(tokens[max(length - window, 0) : length])
                if any(stop in text for stop in params.stop):
                    return length
        return None

    def _begun_stop(self, tokens: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens in which a stop string that has begun is complete; 0 if none has."""
        assert self._texts is not None
        texts = self._texts()
        num_tokens = _window(texts, params) - 1
        text = texts.decode(tokens[-num_tokens:])
        has_begun = text.endswith(_HALF_A_CHARACTER) or any(
            text.endswith(stop[:length]) for stop in params.stop for length in range(1, len(stop))
        )
        return num_tokens if has_begun else 0


def texts_of(tokenizer: Any, hf_checkpoint: Path) -> Texts:
    """Returns the texts of a checkpoint's tokenizer, with the ends that SGLang reads from the checkpoint."""
    added = tokenizer.get_added_vocab()
    ends = {added[text] for text in _END_TEXTS if text in added} | end_tokens(hf_checkpoint)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return Texts(
        decode=lambda tokens: str(tokenizer.decode(list(tokens))),
        num_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        end_tokens=frozenset(ends),
    )


def _window(texts: Texts, params: SamplingParams) -> int:
    """The number of last tokens in whose text SGLang looks for stop strings; 0 for a request without any."""
    return max((texts.num_tokens(stop) + 1 for stop in params.stop), default=0)


GRACE_SECONDS = 10.0
"""The time that an engine may take to answer a request that is ended."""
_AGAIN_SECONDS = 1.0
_GENERATING = (EngineState.READY, EngineState.LEAVING)

EndRequest = Callable[[str], Awaitable[None]]


def request_ender(engines: Callable[[], Sequence[Engine]]) -> EndRequest:
    """Returns a function that ends the request of an id, at whichever engine the router has sent it to."""

    async def end(request_id: str) -> None:
        serving = (engine for engine in engines() if engine.state in _GENERATING)
        ends = (engine.client.abort(request_id) for engine in serving)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, HeadraceError):
                log.info("request_not_ended", request_id=request_id, error=result.message)

    return end


@contextlib.asynccontextmanager
async def ended_after(seconds: float, request_id: str, end: EndRequest) -> AsyncIterator[None]:
    """Ends the request after `seconds` of the block, again and again: it may still be on its way to an engine."""

    async def end_it() -> None:
        await asyncio.sleep(seconds)
        while True:
            await end(request_id)
            await asyncio.sleep(_AGAIN_SECONDS)

    ending = asyncio.create_task(end_it())
    try:
        yield
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


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
        stop_strings: StopStrings | None = None,
    ) -> None:
        """`has_grammars`: engines can follow a JSON schema or a regular expression."""
        self._stop_strings = stop_strings or StopStrings()
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
        sampling_mask: bool = False,
    ) -> Generation:
        """Returns a finished response. Requests of one `routing_key` go to one engine, whose prefix cache they share.

        Raises Unavailable or DeadlineExceeded when there is none within `seconds`.

        With `return_partial` it is not continued after an abort: the tokens so far are returned with finish ABORT, and
        the event is set for all who share it; when another sets it, generation ends at its next interruption. After
        `seconds` the tokens so far are returned in the same way, if there are any, and the event is not set.
        """
        is_partial = return_partial is not None
        request = ResponseRequest(request_id, False, is_partial, priority, images, routing_key, sampling_mask)
        pieces = self._pieces(request, prompt, params, begun, seconds, return_partial)
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
        adapter: str = "",
    ) -> AsyncGenerator[Generation, None]:
        """Yields all tokens so far, again and again; the last one has a `finish` of stop or length."""
        request = ResponseRequest(request_id, True, images=images, routing_key=routing_key, adapter=adapter)
        return self._pieces(request, prompt, params, begun, seconds)

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

    async def _pieces(
        self,
        request: ResponseRequest,
        prompt: Sequence[int],
        params: SamplingParams,
        begun: Generation,
        seconds: float,
        return_partial: asyncio.Event | None = None,
    ) -> AsyncGenerator[Generation, None]:
        end = time.monotonic() + seconds
        params = self._fitting(len(prompt), params)
        last = len(begun.tokens) - 1
        done = _within(await self._ended(begun, params, ResumePoint(last, last), len(prompt)), params)
        backoff = Backoff()
        number = 0
        while done.finish is Finish.ABORT and (left := end - time.monotonic()) > 0 and not _is_set(return_partial):
            number += 1
            rest = await self._stop_strings.next_request(params, done.tokens)
            one = replace(request, request_id=f"{request.request_id}#{number}")
            attempt = ResponseAttempt(done, len(done.tokens) + rest.max_new_tokens)
            pieces = self._ask(one, [*prompt, *done.tokens], rest, left)
            joined = self._joined(attempt, pieces, params, len(prompt), streaming=request.streaming)
            async with contextlib.aclosing(joined):
                async for so_far in joined:
                    yield so_far
            if attempt.is_final:
                return
            if attempt.is_answered_in_full and attempt.asked_tokens < params.max_new_tokens:
                done = attempt.so_far  # fewer tokens were asked for than are left
                continue
            has_time = end - time.monotonic() > backoff.seconds
            attempt.require_another(has_time=has_time, returns_partial=request.returns_partial)
            if attempt.failure is None and len(attempt.so_far.tokens) > len(done.tokens):
                backoff.reset()
            done = _within(_continuable(attempt.so_far, params, streaming=request.streaming), params)
            if done.finish is Finish.ABORT:
                has_begun = attempt.failure is None and len(done.tokens) > len(begun.tokens)
                if return_partial and has_begun and time.monotonic() < end:
                    return_partial.set()
                await _set_within(return_partial, backoff.next_seconds(at_most=end - time.monotonic()))
        is_partial = _is_set(return_partial) or (request.returns_partial and done.tokens)
        if done.finish is Finish.ABORT and not is_partial:
            raise DeadlineExceeded(f"request {request.request_id} had {len(done.tokens)} tokens after {seconds:g} s")
        yield done

    async def _joined(
        self,
        attempt: ResponseAttempt,
        pieces: AsyncGenerator[Generation],
        params: SamplingParams,
        num_prompt_tokens: int,
        *,
        streaming: bool,
    ) -> AsyncGenerator[Generation, None]:
        """Yields the response with what the attempt adds, up to its end, and notes how the attempt ended."""
        before = attempt.so_far
        try:
            async with contextlib.aclosing(pieces), of_grammar(params):
                async for piece in pieces:
                    if streaming and len(before.tokens) + len(piece.tokens) < len(attempt.so_far.tokens):
                        raise Unavailable(
                            "the weights were withdrawn: send the request again", reason="WEIGHTS_REFUSED"
                        )
                    resume = ResumePoint(len(before.tokens), len(attempt.so_far.tokens))
                    attempt.so_far = before.then(piece)
                    if attempt.so_far.finish is Finish.LENGTH and attempt.is_answered_in_full:
                        attempt.so_far = _within(replace(attempt.so_far, finish=Finish.ABORT), params)
                    attempt.so_far = await self._ended(attempt.so_far, params, resume, num_prompt_tokens)
                    yield attempt.so_far
                    if attempt.so_far.finish is Finish.STOP:
                        return
        except BadAnswer as error:
            self._suspect(error)
            attempt.failure = error
        except (InvalidArgument, FailedPrecondition) as error:
            if not params.is_constrained:
                self._suspect(BadAnswer("refused", error.message))  # it may refuse whatever it is asked
            raise
        except (Unavailable, DeadlineExceeded) as error:
            attempt.failure = error

    async def _ended(
        self, response: Generation, params: SamplingParams, resume: ResumePoint, num_prompt_tokens: int
    ) -> Generation:
        if not response.tokens or params.is_constrained:
            return response
        length = await self._stop_strings.length(response, params, resume)
        return response if length is None else response.until(length, num_prompt_tokens, Finish.STOP)

    async def _ask(
        self, request: ResponseRequest, tokens: list[int], params: SamplingParams, seconds: float
    ) -> AsyncGenerator[Generation, None]:
        ending: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if request.returns_partial and self._end_request:
            ending = ended_after(seconds, request.request_id, self._end_request)
            seconds += GRACE_SECONDS
        end = time.monotonic() + seconds
        cache_key = self._weights.cache_key
        traced = tracing.span(tracing.GENERATE, attributes={"headrace.request": request.request_id}, has_children=False)
        if not request.streaming:
            with traced as span, self._activity.requests(), self._adapter_of(request) as adapter:
                async with ending:
                    answer = await self._router.generate(
                        tokens,
                        params,
                        request_id=request.request_id,
                        cache_key=cache_key,
                        seconds=seconds,
                        priority=request.priority,
                        images=request.images,
                        routing_key=request.routing_key,
                        sampling_mask=request.sampling_mask,
                        adapter=adapter,
                    )
                _show(span, answer)
            yield await self._accepted(answer, len(tokens), end)
            return
        with traced as span, self._activity.requests(), self._adapter_of(request) as adapter:
            answers = self._router.stream(
                tokens,
                params,
                request_id=request.request_id,
                cache_key=cache_key,
                seconds=seconds,
                images=request.images,
                routing_key=request.routing_key,
                adapter=adapter,
            )
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    _show(span, answer)
                    generation = await self._accepted(answer, len(tokens), end)
                    yield generation
                    if len(generation.tokens) < len(answer.tokens):
                        return  # what follows was made after tokens of refused weights

    def _adapter_of(self, request: ResponseRequest) -> AbstractContextManager[str]:
        return contextlib.nullcontext(request.adapter) if request.adapter else self._weights.using_adapter()

    async def _accepted(self, answer: EngineResponse, num_prompt_tokens: int, end: float) -> Generation:
        """Returns the part of the response from accepted weights, once every verdict on its weights exists."""
        try:
            async with asyncio.timeout(end - time.monotonic()):
                ranges = await self._weights.ranges_of(answer.spans)
        except TimeoutError as error:
            raise DeadlineExceeded("its weights were neither committed nor refused in time") from error
        return Generation.of(answer, ranges, num_prompt_tokens)


def _show(span: tracing.Span, answer: EngineResponse) -> None:
    span.set(tracing.OUTPUT_TOKENS, len(answer.tokens))
    if answer.spans:
        span.set(tracing.LANE, tracing.engine_of(answer.spans[-1].name))


def _within(so_far: Generation, params: SamplingParams) -> Generation:
    """Ends an aborted response that has all its tokens."""
    is_full = so_far.finish is Finish.ABORT and len(so_far.tokens) >= params.max_new_tokens
    return replace(so_far, finish=Finish.LENGTH) if is_full else so_far


def _continuable(so_far: Generation, params: SamplingParams, *, streaming: bool) -> Generation:
    """Returns what the next request continues. Raises Unavailable where the reader has tokens that it cannot."""
    if params.can_be_continued:
        return replace(so_far, finish=Finish.ABORT)
    if streaming and so_far.tokens:
        raise Unavailable(
            "an engine was interrupted, and a response with a grammar or penalties cannot be continued: send "
            "the request again",
            reason="CANNOT_CONTINUE",
        )
    return NOTHING_YET


def _is_set(event: asyncio.Event | None) -> bool:
    return event is not None and event.is_set()


async def _set_within(event: asyncio.Event | None, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (event or asyncio.Event()).wait()
