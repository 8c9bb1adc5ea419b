"""OpenAI's protocol over HTTP: `/v1/…` for callers whose role allows it, `/sessions/ID/v1/…` for an agent's session.

A session's ID is its key: nobody can guess it, and only the agent that plays the task is told. A client that goes away
ends its request at the engine. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
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
from headrace.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_BODY_SECONDS
from headrace.rpc.access import AUTHORIZATION, Access
from headrace.rpc.interceptor import CallsInProgress
from headrace.rpc.log import log
from headrace.session import Ask
from services.rollout.agents.protocol import (
    ChatRequest,
    Choice,
    Chunks,
    CompletionRequest,
    chat_response,
    completion_response,
    parsed,
)
from services.rollout.agents.server import PEER
from services.rollout.agents.session import AgentPolicy, AgentSessions, Session
from services.rollout.production.prompts import IncrementalDetokenizer, PromptEncoder

T = TypeVar("T")

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


_SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
_OPEN = Access(has_certificates=False, tokens=None)


class Gate:
    """Refuses a request before its body is read: the roles of gRPC's callers may ask.

    A caller shows a certificate, or sends a token as OpenAI's clients send their key: `Authorization: Bearer TOKEN`.
    """

    def __init__(self, access: Access = _OPEN) -> None:
        self._access = access

    async def body(self, request: Request, rpc: str, *, has_key: bool) -> bytes:
        """The request's body, once its caller is allowed. `has_key`: the address itself is the key.

        Raises Unauthenticated, PermissionDenied, InvalidArgument or DeadlineExceeded.
        """
        if not (has_key or self._access.is_open):
            self._require_allowed(request, rpc)
        return await _body(request)

    def _require_allowed(self, request: Request, rpc: str) -> None:
        shown = request.scope.get("state", {}).get(PEER, {})
        tokens = [(AUTHORIZATION, value) for value in request.headers.getlist(AUTHORIZATION)]
        caller = self._access.caller(shown, tokens)
        try:
            self._access.require(caller, _SERVICE, rpc)
        except (Unauthenticated, PermissionDenied) as error:
            log.info("openai_refused", caller=caller.name, role=caller.role, path=request.url.path, reason=error.reason)
            if isinstance(error, Unauthenticated):
                raise Unauthenticated(f"{error.message}; OpenAI's clients send it as api_key") from error
            raise


async def _body(request: Request) -> bytes:
    if coding := request.headers.get("content-encoding"):
        raise InvalidArgument(f"Content-Encoding {coding[:40]}: send the JSON as it is", reason="CONTENT_ENCODING")
    if (length := request.headers.get("content-length", "")).isdigit():
        _require_size(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_HTTP_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                _require_size(len(body))
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the body did not end within {MAX_HTTP_BODY_SECONDS:g} s: it had {len(body):,} bytes by then",
            reason="REQUEST_TOO_SLOW",
        ) from error
    return bytes(body)


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_HTTP_BODY_BYTES:
        raise InvalidArgument(
            f"the request has {num_bytes:,} bytes or more, may have {MAX_HTTP_BODY_BYTES:,}", reason="BODY_TOO_LARGE"
        )


class Endpoint:
    """The routes of the OpenAI endpoint and what answers them."""

    def __init__(
        self, sessions: AgentSessions, policy: AgentPolicy, encoder: PromptEncoder, model: str, gate: Gate | None = None
    ) -> None:
        """`gate`: who may ask what; without one, every client may."""
        self._gate = gate or Gate()
        self._sessions = sessions
        self._policy = policy
        self._encoder = encoder
        self._model = model
        self._began = int(time.time())
        self.calls = CallsInProgress()

    def application(self) -> Starlette:
        """Returns the routes as an ASGI application."""
        routes = [
            Route(f"{prefix}/v1/{path}", self._guarded(handler, rpc), methods=[method])
            for prefix in ("", "/sessions/{session_id}")
            for path, method, handler, rpc in (
                ("chat/completions", "POST", self._chat, "Generate"),
                ("completions", "POST", self._completion, "Generate"),
                ("models", "GET", self._models, "GetFleet"),
            )
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})

    def _guarded(
        self, handler: Callable[[Request, Session, bytes], Coroutine[Any, Any, Response]], rpc: str
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """`rpc` is the call of RolloutService that the same roles may make."""

        async def guarded(request: Request) -> Response:
            session_id = request.path_params.get("session_id")
            try:
                with self.calls.one("the request"):
                    body = await self._gate.body(request, rpc, has_key=session_id is not None)
                    return await handler(request, self._sessions.find(session_id), body)
            except HeadraceError as error:
                return _refusal(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001  # one request's bug ends neither the others nor the service
                log.error("openai_request_failed", path=request.url.path, exc_info=error)
                return _error(500, "server_error", "the request failed: the rollout service's log says why", None, None)

        return guarded

    async def _models(self, request: Request, session: Session, body: bytes) -> Response:
        model = {"id": self._model, "object": "model", "created": self._began, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request, session: Session, body: bytes) -> Response:
        return await self._answered(request, session, parsed(body, ChatRequest), chat_response)

    async def _completion(self, request: Request, session: Session, body: bytes) -> Response:
        return await self._answered(request, session, parsed(body, CompletionRequest), completion_response)

    async def _answered(
        self,
        request: Request,
        session: Session,
        asked: ChatRequest | CompletionRequest,
        respond: Callable[[Any, str, int, list[Choice]], dict[str, Any]],
    ) -> Response:
        session.seconds_left()  # whether it is over
        ask = await self._policy.ask(session, asked)
        if asked.stream:
            task = asyncio.current_task()
            assert task is not None
            first = await _unless_gone(request, session, self._first_events(session, asked, ask, task))
            return StreamingResponse(first, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        choices = await _unless_gone(request, session, self._policy.choices(session, asked, ask))
        return JSONResponse(respond(asked, self._model, len(ask.tokens), choices))

    async def _first_events(
        self, session: Session, asked: ChatRequest | CompletionRequest, ask: Ask, task: asyncio.Task[Any]
    ) -> AsyncIterator[bytes]:
        """Returns the events once there is a first one, so that a refusal still has a status of its own."""
        events = self._events(session, asked, ask, task)
        first = await anext(events)

        async def all_events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(events):
                yield first
                async for event in events:
                    yield event

        return all_events()

    async def _events(
        self, session: Session, asked: ChatRequest | CompletionRequest, ask: Ask, task: asyncio.Task[Any]
    ) -> AsyncGenerator[bytes, None]:
        chunks, pieces, sent = Chunks(asked, self._model), IncrementalDetokenizer(self._encoder.decode), ""
        has_tools = isinstance(asked, ChatRequest) and bool(asked.offered_tools)
        held_back = has_tools or bool(asked.stops or session.params.stop)
        with _counted(session, task):
            generations = self._policy.stream(session, asked, ask)
            started = False
            async with contextlib.aclosing(generations):
                async for so_far in generations:
                    if not started:
                        yield chunks.first()
                        started = True
                    is_last = so_far.finish is not None and so_far.finish.is_final
                    if not held_back and not is_last and (text := pieces.next(so_far.tokens, is_last=False)):
                        sent += text
                        yield chunks.text(text)
            choice = await self._policy.record(session, asked, ask, so_far)
            if left := choice.answer.content.removeprefix(sent):
                yield chunks.text(left)
            yield chunks.last(choice, len(ask.tokens))


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


def _refusal(error: HeadraceError) -> Response:
    status, kind = next((known for cls, known in _STATUS.items() if isinstance(error, cls)), (500, "server_error"))
    code = _CODES.get(error.reason, error.reason.lower())
    status = _OF_REASON.get(error.reason, status)
    refusal = _error(status, kind, error.message, getattr(error, "field", None), code)
    if status == 401:
        refusal.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RetryableError):
        refusal.headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    return refusal


def _error(status: int, kind: str, message: str, param: str | None, code: str | None) -> Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status_code=status)


async def _unknown_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    ways = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models, also below /sessions/ID"
    return _error(status, "invalid_request_error", f"{request.method} {request.url.path}: there are {ways}", None, None)
