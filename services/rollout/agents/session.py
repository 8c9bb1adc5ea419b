"""A session: the requests of one agent's run, answered by the engines within its limits, and recorded."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.hooks.agent import ROLE_MARK, as_role
from headrace.hooks.kit.tool_call import divided_thought, opened_thought
from headrace.rpc import tracing
from headrace.session import ALL_TOKENS, Ask, RecordedAnswer, SessionRecord
from services.rollout.admission import EngineSlots, Kind
from services.rollout.agents.dialects.core import Asked, Call, Reply, TemplateMessage
from services.rollout.agents.tool_calls import ToolCallReader
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.engine.replies import Finish
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import STATUS, masked

_MOST_ROLES = 16


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
    mask_tokens: int | None = None
    """The most that a sampling mask has; None where engines are not asked for masks."""
    requests: set[asyncio.Task[object]] = field(default_factory=set)
    kept: dict[str, Sequence[TemplateMessage]] = field(default_factory=dict)
    """Conversations by the ids of their responses, where the client names them in later requests."""
    role: str = ""
    """Which of several agents of the task it is; empty where there is one."""
    roles: dict[str, Session] = field(default_factory=dict)
    """The sessions of several agents, with a record each."""
    spans: tracing.Contexts = ()
    """Those of the sample that is played."""
    answered: float | None = None
    """When its agent had the last response, in Unix seconds."""
    _asked: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def lend(self, lease: str | None) -> None:
        """Begins a new run: from now on only requests under this lease are answered."""
        for asked in self.requests:
            asked.cancel()
        self._empty()
        self.run, self.is_cut = "", False
        self.lease, self.is_lent, self._begun = lease, True, time.monotonic()

    def begin(self, run: str) -> None:
        """An agent that was begun again, because its process was lost, begins a record of its own.

        Raises NotFound for a host whose lease has ended.
        """
        if self.is_lent and (self.lease is None or run.partition(".")[0] != self.lease):
            raise NotFound(f"session {self.session_id}: the lease of this base_url has ended: another host plays it")
        if run != self.run and (self.record.num_answers or self.roles):
            self._empty()
        self.run = run

    def of_role(self, role: str) -> Session:
        """Returns the session of one of several agents: the same limits, and a record of its own.

        Raises InvalidArgument for another name than `as_role` gives, and for too many.
        """
        if role not in self.roles:
            as_role("/v1", role)
            if len(self.roles) == _MOST_ROLES:
                raise InvalidArgument(f"role {role}: a task has at most {_MOST_ROLES} roles")
            self.roles[role] = replace(self, record=self.record.emptied(), kept={}, role=role, roles={})
        return self.roles[role]

    def all(self) -> list[Session]:
        """Returns the sessions that have answers: of each role, or the one without a role."""
        every = [self, *(self.roles[role] for role in sorted(self.roles))]
        return [session for session in every if session.record.num_answers]

    def _empty(self) -> None:
        self.record, self.kept, self.roles, self.answered = self.record.emptied(), {}, {}, None

    async def close(self) -> None:
        """Ends what is still asked. Later requests are refused."""
        for session in (self, *self.roles.values()):
            session.is_closed = True
        for request in self.requests:
            request.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)

    def seconds_left(self) -> float:
        """Raises NotFound where the session is over."""
        left = self.limits.seconds - (time.monotonic() - self._begun)
        if self.is_closed or left <= 0:
            raise NotFound(f"session {self.session_id} is over: its agent has ended, or had {self.limits.seconds:g} s")
        return left

    def params_of(self, asked: Asked, num_tokens: int, number: int) -> SamplingParams:
        """Returns the parameters for one choice. Raises InvalidArgument where a limit of the session is reached."""
        self._require_turns()
        params = asked.settings.params(self.params, is_recorded=self.is_recorded)
        room = params.max_new_tokens if self.limits.context is None else self.limits.context - num_tokens
        if room <= 0:
            self.is_cut = True
            raise InvalidArgument(
                f"the messages have {num_tokens:,} tokens: rollout_max_context_len is {self.limits.context:,}",
                reason="PROMPT_TOO_LONG",
                field="messages",
            )
        if self.is_recorded:
            self._warn_of_the_jobs(asked)
        return replace(params, max_new_tokens=min(params.max_new_tokens, room), seed=self._seed(params.seed, number))

    def _warn_of_the_jobs(self, asked: Asked) -> None:
        """Says where a request asks for other values than the job's."""
        for name in ("temperature", "top_p", "top_k"):
            value, jobs = asked.settings.values.get(name), getattr(self.params, name)
            if value is not None and value != jobs:
                has = "all tokens" if jobs is None else f"{jobs:g}"
                self.warn(
                    f"the agent asks for {name} {value:g}: samples are trained at --rollout-{name.replace('_', '-')} "
                    f"{has}, and drawn with it"
                )

    def next_request(self) -> str:
        """Returns an id for the engine."""
        self._asked += 1
        return f"{self.session_id}{self.role}-{self._asked}"

    def _require_turns(self) -> None:
        if self.limits.turns is not None and self.record.num_answers >= self.limits.turns:
            self.is_cut = True
            raise FailedPrecondition(
                f"the session has had its {self.limits.turns} turns (--max-turns): end here", reason="MAX_TURNS"
            )

    def _seed(self, seed: int | None, number: int) -> int | None:
        """Each response has a seed of its own, which depends on the sample's alone."""
        if seed is None or (self._asked + number == 0 and not self.role):
            return seed
        digest = hashlib.sha256(f"{seed}{self.role}/{self._asked}/{number}".encode()).digest()
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
        whole, _, role = session_id.partition(ROLE_MARK)
        name, _, run = whole.partition(".")
        if session := self._open.get(name):
            session.begin(run)
            return session.of_role(role) if role else session
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

    async def ask(self, session: Session, asked: Asked) -> Ask:
        """Returns the request as tokens. Raises InvalidArgument where the chat template refuses it."""
        record, now = session.record, time.time()
        tracing.adopt(session.spans)
        if session.answered is not None:
            tracing.record("rl.environment", session.spans, session.answered, now, {})
        if asked.messages is None:
            return await self._encoder.off_loop(record.ask_text, asked.text)
        ask = await self._encoder.off_loop(
            record.ask, asked.messages, asked.tools, {**self._encoder.known(asked.hints), **asked.variables}
        )
        if asked.without_thoughts and opened_thought(ask.text):
            raise InvalidArgument("thinking cannot be disabled: the chat template opens a thought", field="thinking")
        return ask

    async def replies(self, session: Session, asked: Asked, ask: Ask) -> list[Reply]:
        """Returns and records `num_choices` responses."""
        name, left = session.next_request(), session.seconds_left()
        all_params = [session.params_of(asked, len(ask.tokens), number) for number in range(asked.num_choices)]
        if not session.is_recorded:
            self._slots.require_room(len(all_params))

        async def generated(number: int, params: SamplingParams) -> Generation:
            async with self._slot(session, left):
                return await self._generated(session, ask, params, f"{name}-{number}")

        generations = await asyncio.gather(*(generated(*each) for each in enumerate(all_params)))
        return [await self.record(session, asked, ask, generation) for generation in generations]

    async def _generated(self, session: Session, ask: Ask, params: SamplingParams, name: str) -> Generation:
        params, has_mask = masked(params, session.mask_tokens)
        return await self._generator.generate(
            ask.tokens,
            params,
            request_id=name,
            seconds=session.seconds_left(),
            priority=session.priority,
            routing_key=session.session_id,
            sampling_mask=has_mask,
        )

    async def stream(self, session: Session, asked: Asked, ask: Ask) -> AsyncGenerator[Generation, None]:
        """Yields all tokens so far, again and again; the last is not recorded yet.

        All at once where the engine says their sampling masks, which it does not in a stream.
        """
        name, left = session.next_request(), session.seconds_left()
        params = session.params_of(asked, len(ask.tokens), 0)
        async with self._slot(session, left):
            if masked(params, session.mask_tokens)[1]:
                yield await self._generated(session, ask, params, name)
                return
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

    async def record(self, session: Session, asked: Asked, ask: Ask, generation: Generation) -> Reply:
        """Records a response and returns it as the client is given it."""
        reply = await self._reply(session, asked, ask, generation)
        message = None if asked.messages is None else reply.message()
        if generation.tokens:
            session.record.add(ask, reply.answer, message)
        session.answered = time.time()
        if asked.keep_as is not None and message is not None:
            session.kept[asked.keep_as] = (*asked.conversation, message)
        return reply

    async def _reply(self, session: Session, asked: Asked, ask: Ask, generation: Generation) -> Reply:
        tokens, mask = generation.tokens, generation.sampling_mask
        ends = generation.finish is Finish.STOP and bool(tokens) and self._ends(session, tokens[-1])
        end = self._encoder.decode_exactly(tokens[-1:]) if ends else ""
        text = self._encoder.decode_exactly(tokens).removesuffix(end)
        content, rest, stop = _cut(text, (*session.params.stop, *asked.settings.stops))
        opened, calls = opened_thought(ask.text), list[Call]()
        if asked.tools:
            content, called, calls = await self._tool_calls.read(content, asked.tools, in_thought=bool(opened))
            rest = called + rest
        answer = RecordedAnswer(
            tokens=tokens,
            log_probs=generation.log_probs,
            policy_ranges=generation.policy_ranges,
            status=STATUS[generation.finish or Finish.ABORT],
            content=content,
            rest=rest,
            end=end,
            kept=None if session.mask_tokens is None else mask.by_token if mask else [ALL_TOKENS] * len(tokens),
        )
        thought, spoken = "", content
        if asked.splits_thoughts:
            thought, spoken = divided_thought(content, in_thought=bool(opened))
            spoken = spoken if spoken.strip() else ""
        if spoken != content:
            answer = replace(answer, content="", rest=content + rest, opened=opened)
        return Reply(
            answer,
            spoken,
            calls,
            thought,
            stop=stop if stop in asked.settings.stops else None,
            decode=self._encoder.decode_exactly,
        )

    def _ends(self, session: Session, token: int) -> bool:
        return self._encoder.is_special(token) or token in session.params.stop_token_ids


def _cut(text: str, stops: tuple[str, ...]) -> tuple[str, str, str | None]:
    """(what stands before the first stop string, the rest, that stop string)."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    start, stop = min(found, default=(len(text), None))
    return text[:start], text[start:], stop
