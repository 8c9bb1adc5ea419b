"""HTTP to engines: the work of a request does not grow with the requests that are sent at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from services.rollout.engine.http import Http
from tests.support.call_counter import CallCounter

NUM_REQUESTS = 1024
MOST_CALLS = 2_000
"""Of functions, for each request. A pool that looks at all connections for each request needs several times as many."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server, in a thread of its own, that answers nobody before everybody has asked."""
    listening = threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    address: list[str] = []
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(address, listening, stop),))
    thread.start()
    listening.wait()
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


async def _serve(address: list[str], listening: threading.Event, stop: asyncio.Event) -> None:
    waiting: list[asyncio.Future[None]] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        mine = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == NUM_REQUESTS:
            for one in waiting:
                one.set_result(None)
        await mine
        return web.json_response({"text": "x" * 500})

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=NUM_REQUESTS)
    await site.start()
    host, port = runner.addresses[0]
    address.append(f"http://{host}:{port}")
    listening.set()
    await stop.wait()
    await runner.cleanup()


async def test_a_thousand_requests_at_once_are_a_thousand_times_the_work_of_one(url: str) -> None:
    http = Http(url)
    body = {"input_ids": list(range(500))}
    with CallCounter() as counter:
        asked = [http.request("POST", "/generate", body, seconds=300.0) for _ in range(NUM_REQUESTS)]
        replies = await asyncio.gather(*asked)
    await http.close()
    assert {reply.status for reply in replies} == {200}
    assert counter.num_calls < MOST_CALLS * NUM_REQUESTS
