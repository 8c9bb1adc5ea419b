"""Accepts the connections of an HTTP port, within the limits of `visits.py`, and encrypts them.

A connection has one deadline from its start to the end of its first request's head, its handshake included: a byte now
and then does not prolong it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from headrace.limits import MAX_HANDSHAKE_SECONDS, MAX_HTTP_HEADER_SECONDS
from headrace.rpc.http.visits import Visits
from headrace.rpc.log import log

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.2


class Guest:
    """One connection, as its protocol tells about it."""

    def __init__(self, host: str, visits: Visits) -> None:
        self.host = host
        self._visits = visits
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._transport: asyncio.BaseTransport | None = None

    def opens(self, opening: asyncio.Task[None]) -> None:
        """`opening` is its handshake."""
        self._opening = opening
        self.silent()

    def made(self, transport: asyncio.BaseTransport) -> None:
        """The protocol has its connection."""
        self._transport = transport

    def silent(self) -> None:
        """It waits for the head of a request, and not long."""
        self._visits.silent(self)
        if self._deadline is None:
            self._deadline = self._loop.call_later(MAX_HTTP_HEADER_SECONDS, self.close)

    def speaks(self) -> None:
        """The head of a request has come."""
        self._visits.speaks(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def left(self) -> None:
        """The connection is closed."""
        self.speaks()
        self._visits.leave(self)

    def close(self) -> None:
        """Ends the connection at once, whatever is under way."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()


class Door:
    """States: built → open → closed. It has what uvicorn wants of a server."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[Guest], asyncio.Protocol],
        context: ssl.SSLContext | None,
        visits: Visits | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._protocol = protocol
        self._context = context
        self.visits = visits or Visits()
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Accepts from now on."""
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accepts no more; connections that are open stay so."""
        for task in (self._accepting, *self._opening):
            if task is not None:
                task.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        """Returns at once: nothing is left to wait for."""

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    log.warning("connection_not_accepted", error=error.strerror)
                    await asyncio.sleep(_PAUSE_SECONDS)
                continue
            guest = Guest(str(address[0]), self.visits)
            if not self.visits.enter(guest):
                connection.close()
                continue
            opening = asyncio.create_task(self._open(connection, guest))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            guest.opens(opening)

    async def _open(self, connection: socket.socket, guest: Guest) -> None:
        timeout = MAX_HANDSHAKE_SECONDS if self._context else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(guest), connection, ssl=self._context, ssl_handshake_timeout=timeout
            )
        except (OSError, asyncio.CancelledError):  # no TLS, an unknown certificate, too slow, or closed for others
            guest.left()
            with contextlib.suppress(OSError):
                connection.close()
