"""A session: the requests of one agent's run, answered by the engines within its limits, and recorded."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.hooks.kit.tool_call import opens_thought
from headrace.session import Ask, RecordedAnswer, SessionRecord
from services.rollout.admission import EngineSlots, Kind
from services.rollout.agents.protocol import ChatRequest, Choice, CompletionRequest, Message
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import STATUS


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session; `context` counts the tokens of a prompt and its response."""

    seconds: float
    turns: int | None = None
    context: int | None = None


@dataclass(eq=False, slots=True)
class Session:
    """An agent's session. An outside client's request has a session of its own, which is not recorded."""

    session_id: str
    record: SessionRecord
    params: SamplingParams
    limits: SessionLimits
    is_recorded: bool = True
    warn: Callable[[str], None] = lambda _: None
    is_cut: bool = False
    """True once a limit has refused a request."""
    is_closed: bool = False
    run: str = ""
    lease: str | None = None
    """The one lease under which an agent host may ask; None where the service plays the agent itself."""
    is_lent: bool = False
    priority: int | None = None
    requests: set[asyncio.Task[object]] = field(default_factory=set)
    _asked: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def lend(self, lease: str | None) -> None:
        """Begins a new run: from now on only requests under this lease are answered."""
        for asked in self.requests:
            asked.cancel()
        self.record, self.run, self.is_cut = self.record.emptied(), "", False
        self.lease, self.is_lent, self._begun = lease, True, time.monotonic()

    def begin(self, run: str) -> None:
        """An agent that was begun again, because its process was lost, begins a record of its own.

        Raises NotFound for a host whose lease has ended.
        """
        if self.is_lent and (self.lease is None or run.partition(".")[0] != self.lease):
            raise NotFound(f"session {self.session_id}: the lease of this base_url has ended: another host plays it")
        if run != self.run and self.record.num_answers:
            self.record = self.record.emptied()
        self.run = run

    async def close(self) -> None:
        """Ends what is still asked. Later requests are refused."""
        self.is_closed = True
        for request in self.requests:
            request.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)

    def seconds_left(self) -> float:
        """Raises NotFound where the session is over."""
        left = self.limits.seconds - (time.monotonic() - self._begun)
        if self.is_closed or left <= 0:
            raise NotFound(f"session {self.session_id} is over: its agent has ended, or had {self.limits.seconds:g} s")
        return left

    def params_of(self, request: ChatRequest | CompletionRequest, num_tokens: int, number: int) -> SamplingParams:
        """Returns the parameters for one choice. Raises InvalidArgument where a limit of the session is reached."""
        self._require_turns()
        params = request.params(self.params, is_recorded=self.is_recorded)
        room = params.max_new_tokens if self.limits.context is None else self.limits.context - num_tokens
        if room <= 0:
            self.is_cut = True
            raise InvalidArgument(
                f"the messages have {num_tokens:,} tokens: rollout_max_context_len is {self.limits.context:,}",
                reason="PROMPT_TOO_LONG",
                field="messages",
            )
        if self.is_recorded:
            self._warn_of_the_jobs(request)
        return replace(params, max_new_tokens=min(params.max_new_tokens, room), seed=self._seed(params.seed, number))

    def _warn_of_the_jobs(self, request: ChatRequest | CompletionRequest) -> None:
        """Says where a request asks for other values than the job's."""
        asked_top_k = request.top_k if request.top_k and request.top_k > 0 else None
        for name, asked in (("temperature", request.temperature), ("top_p", request.top_p), ("top_k", asked_top_k)):
            if asked is not None and asked != (jobs := getattr(self.params, name)):
                has = "all tokens" if jobs is None else f"{jobs:g}"
                self.warn(
                    f"the agent asks for {name} {asked:g}: samples are trained at --rollout-{name.replace('_', '-')} "
                    f"{has}, and drawn with it"
                )

    def next_request(self) -> str:
        """Returns an id for the engine."""
        self._asked += 1
        return f"{self.session_id}-{self._asked}"

    def _require_turns(self) -> None:
        if self.limits.turns is not None and self.record.num_answers >= self.limits.turns:
            self.is_cut = True
            raise FailedPrecondition(
                f"the session has had its {self.limits.turns} turns (--max-turns): end here", reason="MAX_TURNS"
            )

    def _seed(self, seed: int | None, number: int) -> int | None:
        """Each response has a seed of its own, which depends on the sample's alone."""
        if seed is None or self._asked + number == 0:
            return seed
        digest = hashlib.sha256(f"{seed}/{self._asked}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


class AgentSessions:
    """The open sessions by their ids, which nobody can guess."""

    def __init__(self, encoder: PromptEncoder, params: SamplingParams, limits: SessionLimits) -> None:
        self._encoder = encoder
        self._params = params
        self._limits = limits
        self._open: dict[str, Session] = {}

    def open(self, params: SamplingParams, limits: SessionLimits, warn: Callable[[str], None]) -> Session:
        """Returns a session that records."""
        session_id = secrets.token_urlsafe(18)
        session = Session(session_id, SessionRecord(self._encoder), params, limits, warn=warn)
        self._open[session_id] = session
        return session

    async def close(self, session: Session) -> None:
        """Ends its requests; its record stays with the caller."""
        self._open.pop(session.session_id, None)
        await session.close()

    def find(self, session_id: str | None) -> Session:
        """Raises NotFound. Without an id: a new one, which nobody records."""
        if session_id is None:
            name = f"openai-{secrets.token_hex(8)}"
            return Session(name, SessionRecord(self._encoder), self._params, self._limits, is_recorded=False)
        name, _, run = session_id.partition(".")
        if session := self._open.get(name):
            session.begin(run)
            return session
        raise NotFound(f"session {session_id[:40]!r} does not exist, or is over: an agent's sessions end with it")


class AgentPolicy:
    """Answers the requests of sessions with the engines."""

    def __init__(
        self, generator: Generator, encoder: PromptEncoder, tool_calls: ToolCallReader, slots: EngineSlots
    ) -> None:
        """`slots` are for requests of clients; an agent's sample has its slot already."""
        self._generator = generator
        self._encoder = encoder
        self._tool_calls = tool_calls
        self._slots = slots

    async def ask(self, session: Session, request: ChatRequest | CompletionRequest) -> Ask:
        """Returns the request as tokens. Raises InvalidArgument where the chat template refuses it."""
        record = session.record
        if isinstance(request, ChatRequest):
            messages = [message.for_template() for message in request.messages]
            return await self._encoder.off_loop(record.ask, messages, request.offered_tools, request.variables)
        return await self._encoder.off_loop(record.ask_text, request.prompt)

    async def choices(self, session: Session, request: ChatRequest | CompletionRequest, ask: Ask) -> list[Choice]:
        """Returns and records `n` responses."""
        name, left = session.next_request(), session.seconds_left()
        all_params = [session.params_of(request, len(ask.tokens), number) for number in range(request.num_choices)]
        if not session.is_recorded:
            self._slots.require_room(len(all_params))

        async def generated(number: int, params: SamplingParams) -> Generation:
            async with self._slot(session, left):
                return await self._generator.generate(
                    ask.tokens,
                    params,
                    request_id=f"{name}-{number}",
                    seconds=session.seconds_left(),
                    priority=session.priority,
                    routing_key=session.session_id,
                )

        generations = await asyncio.gather(*(generated(*each) for each in enumerate(all_params)))
        return [await self.record(session, request, ask, generation) for generation in generations]

    async def stream(
        self, session: Session, request: ChatRequest | CompletionRequest, ask: Ask
    ) -> AsyncGenerator[Generation, None]:
        """Yields all tokens so far, again and again; the last is not recorded yet."""
        name, left = session.next_request(), session.seconds_left()
        params = session.params_of(request, len(ask.tokens), 0)
        async with self._slot(session, left):
            pieces = self._generator.stream(
                ask.tokens,
                params,
                request_id=name,
                seconds=session.seconds_left(),
                routing_key=session.session_id,
            )
            async with aclosing(pieces):
                async for so_far in pieces:
                    yield so_far

    def _slot(self, session: Session, seconds: float) -> AbstractAsyncContextManager[None]:
        return nullcontext() if session.is_recorded else self._slots.slot(Kind.CLIENTS, seconds=seconds)

    async def record(
        self, session: Session, request: ChatRequest | CompletionRequest, ask: Ask, generation: Generation
    ) -> Choice:
        """Records a response and returns it as the client is given it."""
        pieces = [self._encoder.decode_exactly([token]) for token in generation.tokens]
        answer, message = await self._answer(session, request, ask, generation)
        if generation.tokens:
            session.record.add(ask, answer, message.for_template() if isinstance(request, ChatRequest) else None)
        return Choice(answer, message, pieces)

    async def _answer(
        self, session: Session, request: ChatRequest | CompletionRequest, ask: Ask, generation: Generation
    ) -> tuple[RecordedAnswer, Message]:
        tokens = generation.tokens
        ends = generation.finish is Finish.STOP and bool(tokens) and self._ends(session, tokens[-1])
        end = self._encoder.decode_exactly(tokens[-1:]) if ends else ""
        text = self._encoder.decode_exactly(tokens).removesuffix(end)
        calls = None
        content, rest = _cut(text, (*session.params.stop, *request.stops))
        if isinstance(request, ChatRequest) and request.offered_tools:
            content, called, calls = await self._tool_calls.read(
                content, request.offered_tools, in_thought=opens_thought(ask.text)
            )
            rest = called + rest
        answer = RecordedAnswer(
            tokens=tokens,
            log_probs=generation.log_probs,
            policy_ranges=generation.policy_ranges,
            status=STATUS[generation.finish or Finish.ABORT],
            content=content,
            rest=rest,
            end=end,
        )
        return answer, Message("assistant", content, tool_calls=calls or None)

    def _ends(self, session: Session, token: int) -> bool:
        return self._encoder.is_special(token) or token in session.params.stop_token_ids


def _cut(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """(what stands before the first stop string, the rest)."""
    start = min((position for stop in stops if (position := text.find(stop)) >= 0), default=len(text))
    return text[:start], text[start:]
