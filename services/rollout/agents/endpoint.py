"""The dialects over HTTP: `/v1/…` for callers whose role allows it, `/sessions/ID/v1/…` for an agent's session.

A session's ID is its key: nobody can guess it, and only the agent that plays the task is told. A client that goes away
ends its request at the engine. Errors have the dialect's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.api.rollout.v1 import rollout_pb2
from headrace.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RetryableError,
    Unauthenticated,
    Unavailable,
)
from headrace.hooks.kit.tool_call import divided_thought, opens_thought
from headrace.rpc.http_server import Gate
from headrace.rpc.interceptor import CallsInProgress
from headrace.rpc.log import log
from headrace.session import Ask
from services.rollout.agents.dialects.chat import CHAT, COMPLETIONS, error_body
from services.rollout.agents.dialects.core import Asked, Dialect, Exchange
from services.rollout.agents.dialects.messages import MESSAGES
from services.rollout.agents.dialects.responses import RESPONSES
from services.rollout.agents.session import AgentPolicy, AgentSessions, Session
from services.rollout.engine.api import Generation
from services.rollout.production.prompts import IncrementalDetokenizer, PromptEncoder

T = TypeVar("T")
Handler = Callable[[Request, Session, bytes, Dialect], Coroutine[Any, Any, Response]]

_STATUS: dict[type[HeadraceError], tuple[int, str]] = {
    InvalidArgument: (400, "invalid_request_error"),
    FailedPrecondition: (400, "invalid_request_error"),
    Unauthenticated: (401, "authentication_error"),
    PermissionDenied: (403, "permission_error"),
    NotFound: (404, "not_found_error"),
    ResourceExhausted: (429, "rate_limit_error"),
    Unavailable: (503, "service_unavailable_error"),
    DeadlineExceeded: (504, "timeout_error"),
}
_OF_REASON = {"REQUEST_TOO_SLOW": 408, "BODY_TOO_LARGE": 413, "CONTENT_ENCODING": 415}
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "UNAUTHENTICATED": "invalid_api_key"}


_DIALECTS: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "completions": COMPLETIONS,
    "messages": MESSAGES,
    "responses": RESPONSES,
}
"""By the path below /v1/."""

SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name


class Endpoint:
    """The routes of the OpenAI endpoint and what answers them."""

    def __init__(
        self, sessions: AgentSessions, policy: AgentPolicy, encoder: PromptEncoder, model: str, gate: Gate | None = None
    ) -> None:
        """`gate`: who may ask what; without one, every client may."""
        self._gate = gate or Gate(SERVICE)
        self._sessions = sessions
        self._policy = policy
        self._encoder = encoder
        self._model = model
        began = int(time.time())
        self._described = {
            "id": model,
            "object": "model",
            "created": began,
            "owned_by": "headrace",
            "type": "model",
            "display_name": model,
            "created_at": f"{datetime.fromtimestamp(began, UTC):%FT%TZ}",
        }
        """As OpenAI and Anthropic describe a model, in one."""
        self.calls = CallsInProgress()

    def application(self) -> Starlette:
        """Returns the routes as an ASGI application."""
        handlers: list[tuple[str, str, Handler, str, Dialect]] = [
            *((path, "POST", self._respond, "Generate", dialect) for path, dialect in _DIALECTS.items()),
            ("messages/count_tokens", "POST", self._count_tokens, "Generate", MESSAGES),
            ("models", "GET", self._models, "GetFleet", CHAT),
            ("models/{name:path}", "GET", self._model_named, "GetFleet", CHAT),
        ]
        routes = [
            Route(f"{prefix}/v1/{path}", self._guarded(handler, rpc, dialect), methods=[method])
            for prefix in ("", "/sessions/{session_id}")
            for path, method, handler, rpc, dialect in handlers
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})

    def _guarded(
        self, handler: Handler, rpc: str, dialect: Dialect
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """`rpc` is the call of RolloutService that the same roles may make."""

        async def guarded(request: Request) -> Response:
            session_id = request.path_params.get("session_id")
            try:
                with self.calls.one("the request"):
                    body = await self._gate.body(request, rpc, has_key=session_id is not None)
                    return await handler(request, self._sessions.find(session_id), body, dialect)
            except HeadraceError as error:
                return _refusal(error, dialect)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001  # one request's bug ends neither the others nor the service
                return JSONResponse(_of_bug(request, error, dialect), status_code=500)

        return guarded

    async def _models(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [self._described],
                "has_more": False,
                "first_id": self._model,
                "last_id": self._model,
            }
        )

    async def _model_named(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> Response:
        if (name := request.path_params["name"]) != self._model:
            raise NotFound(f"model {name[:80]!r} does not exist: there is {self._model!r}, which answers for any name")
        return JSONResponse(self._described)

    async def _count_tokens(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> Response:
        _, ask = await self._read(request, session, body, dialect)
        return JSONResponse({"input_tokens": len(ask.tokens)})

    async def _read(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> tuple[Exchange, Ask]:
        if dialect.versions:
            header, known = dialect.versions
            if (version := request.headers.get(header)) not in (None, *known):
                raise InvalidArgument(
                    f"{header} {str(version)[:40]} is not supported: send {' or '.join(known)}", field=header
                )
        exchange = dialect.read(body, self._model, session.kept if session.is_recorded else None)
        session.seconds_left()  # whether it is over
        return exchange, await self._policy.ask(session, exchange.asked)

    async def _respond(self, request: Request, session: Session, body: bytes, dialect: Dialect) -> Response:
        exchange, ask = await self._read(request, session, body, dialect)
        asked = exchange.asked
        if asked.stream:
            task = asyncio.current_task()
            assert task is not None
            events = self._events(request, session, exchange, ask, task, dialect)
            first = await _unless_gone(request, session, _begun(events))
            return StreamingResponse(first, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        replies = await _unless_gone(request, session, self._policy.replies(session, asked, ask))
        return JSONResponse(exchange.body(replies, len(ask.tokens)))

    async def _events(
        self,
        request: Request,
        session: Session,
        exchange: Exchange,
        ask: Ask,
        task: asyncio.Task[Any],
        dialect: Dialect,
    ) -> AsyncGenerator[bytes, None]:
        """An error before the first event is raised; a later one is an event."""
        asked, has_begun = exchange.asked, False
        try:
            with _counted(session, task):
                generations = self._policy.stream(session, asked, ask)
                said = _Said(self._encoder, asked, ask, has_stops=bool(session.params.stop or asked.settings.stops))
                async with contextlib.aclosing(generations):
                    async for so_far in generations:
                        if not has_begun:
                            yield exchange.begin(len(ask.tokens))
                            has_begun = True
                        if event := exchange.progress(*said.by(so_far)):
                            yield event
                reply = await self._policy.record(session, asked, ask, so_far)
                yield exchange.end(reply, len(ask.tokens))
        except Exception as error:
            if not has_begun:
                raise
            yield exchange.failed(
                _said_of(error, dialect)[1] if isinstance(error, HeadraceError) else _of_bug(request, error, dialect)
            )


class _Said:
    """What a response has said so far. What may still become a tool call or a stop string is held back to the end."""

    def __init__(self, encoder: PromptEncoder, asked: Asked, ask: Ask, *, has_stops: bool) -> None:
        self._pieces = IncrementalDetokenizer(encoder.decode_exactly)
        self._has_stops = has_stops
        self._may_call = bool(asked.tools)
        self._splits_thoughts = asked.splits_thoughts
        self._in_thought = opens_thought(ask.text)
        self._text = ""

    def by(self, so_far: Generation) -> tuple[str, str]:
        """(thought, text)."""
        is_last = so_far.finish is not None and so_far.finish.is_final
        if not self._has_stops and not is_last:
            self._text += self._pieces.next(so_far.tokens, is_last=False) or ""
        thought, text = "", self._text
        if self._splits_thoughts:
            thought, text = divided_thought(text, in_thought=self._in_thought, is_partial=True)
        return thought, "" if self._may_call else text  # nothing is called in a thought


async def _begun(events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Returns the events once there is a first one, so that a refusal still has a status of its own."""
    first = await anext(events)

    async def all_events() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(events):
            yield first
            async for event in events:
                yield event

    return all_events()


async def _unless_gone(request: Request, session: Session, work: Coroutine[Any, Any, T]) -> T:
    """Ends the work when the client closes the connection."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    session.requests.add(working)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        if working.cancelled():
            raise NotFound(f"session {session.session_id} is over: its agent has ended")
        return working.result()
    finally:
        session.requests.discard(working)
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def _counted(session: Session, task: asyncio.Task[Any]) -> Iterator[None]:
    """A stream is ended with its session: `task` is the one that sends it."""
    session.requests.add(task)
    try:
        yield
    finally:
        session.requests.discard(task)


def _refusal(error: HeadraceError, dialect: Dialect) -> Response:
    status, body = _said_of(error, dialect)
    refusal = JSONResponse(body, status_code=status)
    if status == 401:
        refusal.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RetryableError):
        refusal.headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    return refusal


def _said_of(error: HeadraceError, dialect: Dialect) -> tuple[int, Mapping[str, Any]]:
    status, kind = next((known for cls, known in _STATUS.items() if isinstance(error, cls)), (500, "server_error"))
    code = _CODES.get(error.reason, error.reason.lower())
    status = _OF_REASON.get(error.reason, status)
    return status, dialect.error(status, kind, error.message, getattr(error, "field", None), code)


def _of_bug(request: Request, error: Exception, dialect: Dialect) -> Mapping[str, Any]:
    log.error("openai_request_failed", path=request.url.path, exc_info=error)
    return dialect.error(500, "server_error", "the request failed: the rollout service's log says why", None, None)


async def _unknown_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    posts = ", ".join(f"POST /v1/{path}" for path in _DIALECTS)
    message = f"{request.method} {request.url.path}: there are {posts} and GET /v1/models, also below /sessions/ID"
    return JSONResponse(error_body(status, "invalid_request_error", message, None, None), status_code=status)
