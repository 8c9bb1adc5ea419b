"""Prometheus' `/metrics` over HTTP, from a thread of its own with an event loop of its own.

prometheus_client's own server gives each connection a thread for as long as it stays, and makes all of them wait for
one that does not finish its handshake. States: built → started → stopped.
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from prometheus_client import CollectorRegistry, make_wsgi_app

from headrace.limits import MAX_HTTP_HEADER_BYTES, MAX_HTTP_STALL_SECONDS
from headrace.rpc.access.revoked import Revoked
from headrace.rpc.http.certificates import peer_of, server_context
from headrace.rpc.http.door import Door, Guest
from headrace.rpc.net import Address, listener
from headrace.rpc.tls import TlsFolder

_START_SECONDS = 30.0
_END = b"\r\n\r\n"


class MetricsPage:
    """Answers one request a connection, then closes it."""

    def __init__(self, registry: CollectorRegistry, tls: TlsFolder | None) -> None:
        self._application = make_wsgi_app(registry)
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    def start(self, address: Address) -> int:
        """Returns the bound port. Raises OSError or ConfigError."""
        context = server_context(self._tls, needs_certificate=True) if self._tls else None
        revoked = Revoked(self._tls.path) if self._tls else None
        listening = listener(address)
        started: Future[None] = Future()

        async def serve() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            door = Door(listening, lambda guest: _Request(guest, self._application, revoked), context)
            door.open()
            started.set_result(None)
            await self._ended.wait()
            door.close()
            door.visits.close_all()
            await asyncio.sleep(0)  # a turn of the loop, in which they are closed

        threading.Thread(target=lambda: asyncio.run(serve()), name="metrics", daemon=True).start()
        started.result(timeout=_START_SECONDS)
        return int(listening.getsockname()[1])

    def stop(self) -> None:
        """Its port is free soon afterwards."""
        if self._loop is not None and self._ended is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)


class _Request(asyncio.Protocol):
    """One connection: a head is read, an answer written."""

    def __init__(self, guest: Guest, application: Any, revoked: Revoked | None) -> None:
        self._guest = guest
        self._revoked = revoked
        self._application = application
        self._head = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._guest.made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guest.left()
        if self._closing is not None:
            self._closing.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing is not None:
            return
        self._head += data
        head, end, _ = self._head.partition(_END)
        if len(head) > MAX_HTTP_HEADER_BYTES:
            self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif end and self._is_revoked():
            self._answer(HTTPStatus.UNAUTHORIZED)
        elif end:
            self._answer(None, bytes(head))

    def _is_revoked(self) -> bool:
        assert self._transport is not None
        connection = self._transport.get_extra_info("ssl_object")
        return self._revoked is not None and self._revoked.includes(peer_of(connection))

    def _answer(self, refusal: HTTPStatus | None, head: bytes = b"") -> None:
        assert self._transport is not None
        self._guest.speaks()
        self._transport.write(_refused(refusal) if refusal else _answered(head, self._application))
        self._transport.close()
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(MAX_HTTP_STALL_SECONDS, self._transport.abort)


def _answered(head: bytes, application: Any) -> bytes:
    """Returns what the WSGI application says to a GET."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _refused(HTTPStatus.BAD_REQUEST)
    method, target, _ = words
    path, _, query = target.partition("?")
    if method not in ("GET", "OPTIONS"):
        return _refused(HTTPStatus.METHOD_NOT_ALLOWED)
    if unquote(path) not in ("/", "/metrics"):
        return _refused(HTTPStatus.NOT_FOUND)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    environment = {
        "REQUEST_METHOD": method,
        "PATH_INFO": "/metrics",
        "QUERY_STRING": query,
        "HTTP_ACCEPT": headers.get("accept", ""),
        "HTTP_ACCEPT_ENCODING": headers.get("accept-encoding", ""),
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": sys.stderr,
    }
    said: list[tuple[str, list[tuple[str, str]]]] = []
    try:
        body = b"".join(application(environment, lambda status, of_answer: said.append((status, of_answer))))
    except (ValueError, TypeError):  # of a query or a header that means nothing
        return _refused(HTTPStatus.BAD_REQUEST)
    return _message(*said[0], body)


def _refused(status: HTTPStatus) -> bytes:
    text = f"{status.phrase}: ask GET /metrics\n".encode()
    return _message(f"{status.value} {status.phrase}", [("Content-Type", "text/plain")], text)


def _message(status: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join(lines).encode() + _END + body
