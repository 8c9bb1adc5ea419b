"""A network between a client and a server that can be made to misbehave: it relays HTTP/2 frame by frame.

calm → (`arm`) → armed → (a call's HEADERS or DATA frame comes by in the armed direction) → the fault → (`heal`) → calm.
Reset and half-close happen once, a black hole lasts until healed. A healed proxy closes the connections that had
a fault: bytes are missing in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.rpc.net import Address

_PREFACE_BYTES = 24
_FRAME_HEADER_BYTES = 9
_DATA, _HEADERS = 0, 1


class Fault(StrEnum):
    RESET = "reset"
    HALF_CLOSE = "half_close"
    BLACK_HOLE = "black_hole"


class Direction(StrEnum):
    REQUEST = "request"
    ANSWER = "answer"


@dataclass
class FaultProxy:
    """Made by `fault_proxy`."""

    target: Address
    address: str = ""
    times_met: int = 0
    """Frames that met the fault since `arm`."""
    _fault: Fault | None = None
    _direction: Direction = Direction.REQUEST
    _tainted: set[asyncio.StreamWriter] = field(default_factory=set)

    def arm(self, fault: Fault, direction: Direction) -> None:
        """The next frame of a call in this direction meets the fault."""
        self._fault, self._direction, self.times_met = fault, direction, 0

    def heal(self) -> None:
        """All is well for new connections; those that had the fault are closed."""
        self._fault = None
        for writer in self._tainted:
            _reset(writer)
        self._tainted.clear()

    async def serve(self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        """One connection, until both directions have ended."""
        reader, writer = await asyncio.open_connection(self.target.host, self.target.port)
        ends = (client_writer, writer)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._relay(Direction.REQUEST, client_reader, writer, ends))
                both.create_task(self._relay(Direction.ANSWER, reader, client_writer, ends))
        finally:
            for end in ends:
                end.close()
                self._tainted.discard(end)

    async def _relay(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if direction is Direction.REQUEST:
                writer.write(await reader.readexactly(_PREFACE_BYTES))
            while True:
                header = await reader.readexactly(_FRAME_HEADER_BYTES)
                frame = header + await reader.readexactly(int.from_bytes(header[:3], "big"))
                if self._fault and direction is self._direction and header[3] in (_DATA, _HEADERS):
                    await self._hurt(frame, reader, writer, ends)
                    return
                writer.write(frame)
                await writer.drain()
        with contextlib.suppress(ConnectionError, OSError):
            writer.write_eof()

    async def _hurt(
        self,
        frame: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        """Nothing more goes this way."""
        self.times_met += 1
        self._tainted.update(ends)
        match self._fault:
            case Fault.RESET:
                self._fault = None
                writer.write(frame[: len(frame) // 2])
                for end in ends:
                    _reset(end)
            case Fault.HALF_CLOSE:
                self._fault = None
                writer.write_eof()
            case Fault.BLACK_HOLE:
                while await reader.read(65_536):
                    pass


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
    """A calm one, on a free port."""
    proxy = FaultProxy(Address.parse(target))
    connections: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        connections.add(task)
        with contextlib.suppress(asyncio.CancelledError):  # by the end below; Python 3.11's streams log it as an error
            await proxy.serve(reader, writer)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    sock: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
