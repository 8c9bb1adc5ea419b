"""HTTP/1.1 as uvicorn speaks it, with limits on what a client may take its time for, and one way to read a request.

A connection waits for the head of a request (`Guest.silent`) → is answered (`Guest.speaks`) → waits again. A client
that does not read its answer is cut off.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.limits import (
    MAX_HTTP_HEADER_BYTES,
    MAX_HTTP_STALL_SECONDS,
    MAX_SMALL_HTTP_CHUNKS,
    SMALL_HTTP_CHUNK_BYTES,
)
from headrace.rpc.http.certificates import peer_of
from headrace.rpc.http.door import Guest
from services.rollout.agents.gate import PEER


class StrictConnection(h11.Connection):
    """Refuses two kinds of request that h11 takes, and their connections.

    Both Content-Length and Transfer-Encoding (RFC 9112, 6.1): h11 ignores the first. A proxy in front that ignores the
    second would take the end of the body for another request. A body of too many small chunks: each costs h11 as much
    as a large one, so that its bytes would hold up everybody else.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HTTP_HEADER_BYTES)
        self._small_chunks = 0

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError, as for every request that means nothing."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small_chunks = 0
            names = {name for name, _ in event.headers}
            if b"content-length" in names and b"transfer-encoding" in names:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        elif isinstance(event, h11.Data) and event.chunk_start and len(event.data) < SMALL_HTTP_CHUNK_BYTES:
            self._small_chunks += 1
            if self._small_chunks > MAX_SMALL_HTTP_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_SMALL_HTTP_CHUNKS} small chunks")
        return event


class LimitedProtocol(H11Protocol):
    """One connection of the endpoint, with limits."""

    def __init__(self, guest: Guest, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn = StrictConnection()
        self._guest = guest
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self._guest.made(transport)
        shown: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        self.app_state = {**self.app_state, PEER: peer_of(shown)}
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guest.left()
        self._reads_again()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Ends the connection where a response has begun: uvicorn would begin another inside of it, and fail.

        A request before it that is being answered is over as if its client had left, because this ends the connection.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(MAX_HTTP_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._reads_again()
        super().resume_writing()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._guest.silent()
        else:
            self._guest.speaks()

    def _reads_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
