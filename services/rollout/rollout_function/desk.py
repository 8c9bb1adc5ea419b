"""The socket at which data sources of rollout functions ask for groups and end them, in a folder of this user alone.

A connection says first which call it belongs to, and ends with the call. What it sends is bounded, decoded in a thread,
and never unpickled; anything but an order ends it.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headrace.errors import Unavailable
from headrace.hooks.rollout import messages
from headrace.hooks.rollout.function import Desk
from headrace.process.workers.codec import Unreadable
from headrace.rpc.log import log
from headrace.wire.limits import MAX_HOOK_ANSWER_BYTES
from services.rollout.rollout_function.step_call import StepCall


class DataSourceDesk:
    """States: built → started → closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-desk-")
        self._path = Path(self._folder.name) / "desk"
        self._calls: dict[str, StepCall] = {}
        self._connections: dict[str, set[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises Unavailable where the folder for temporary files does not take a socket."""
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        except OSError as error:
            raise Unavailable(f"no socket can be made at {self._path}: {error}: name a folder in TMPDIR") from error

    async def close(self) -> None:
        """Ends every connection."""
        if self._server:
            self._server.close()
        for writers in self._connections.values():
            for writer in writers:
                writer.close()
        self._folder.cleanup()

    @asynccontextmanager
    async def opened(self, call: StepCall) -> AsyncIterator[Desk]:
        """Yields what a worker connects with while the block runs; its connections end with the block."""
        secret = secrets.token_hex(16)
        self._calls[secret], self._connections[secret] = call, set()
        try:
            yield Desk(str(self._path), secret)
        finally:
            del self._calls[secret]
            for writer in self._connections.pop(secret):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await self._next(reader)
            if not isinstance(hello, messages.Hello) or hello.secret not in self._calls:
                raise Unreadable("it does not say whose it is")
            self._connections[hello.secret].add(writer)
            call, reply = self._calls[hello.secret], messages.frame(messages.OrderDone())
            call.begin()
            while hello.secret in self._calls:
                writer.write(reply)
                await writer.drain()
                answered = await call.answer(await self._next(reader))
                reply = await asyncio.to_thread(messages.frame, answered)
        except Unreadable as error:
            log.warning("data_source_connection_refused", why=str(error))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker, or the call, has ended
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _next(self, reader: asyncio.StreamReader) -> messages.Order:
        (size,) = messages.HEADER.unpack(await reader.readexactly(messages.HEADER.size))
        if size > MAX_HOOK_ANSWER_BYTES:
            raise Unreadable(f"{size} bytes are more than the {MAX_HOOK_ANSWER_BYTES} that one group may have")
        return await asyncio.to_thread(messages.read_order, await reader.readexactly(size))
