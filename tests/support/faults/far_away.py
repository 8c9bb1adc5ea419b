"""A relay to a server far away: each byte takes a while, in both directions, and so does the connection itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.rpc.net import Address


@asynccontextmanager
async def far_away(address: str, seconds: float) -> AsyncIterator[str]:
    """The address of a relay to `address`, which is `seconds` away."""
    target, relays = Address.parse(address), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * seconds)  # the way of a SYN, and of its answer
        there, back = await asyncio.open_connection(target.host, target.port)
        for source, sink in ((reader, back), (there, writer)):
            relays.add(asyncio.create_task(_relay(source, sink, seconds)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await source.read(1 << 16):
        loop.call_later(seconds, sink.write, data)  # calls of one delay come in their order
    loop.call_later(seconds, sink.close)
