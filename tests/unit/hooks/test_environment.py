"""Environments with `reset` and `step` behind a URL: over HTTP, and over OpenEnv's socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from headrace.hooks.kit import Environment


class Counting:
    """Counts to a goal: a step of `by` pays `by`; each session has a count of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._counts: dict[str, list[int]] = {}

    async def reset(self, request: web.Request) -> web.Response:
        session_id = str(next(self._numbers))
        self._counts[session_id] = [0, (await request.json()).get("goal", 3)]
        answer = web.json_response({"observation": {"count": 0}, "session_id": session_id, "done": False})
        answer.set_cookie("session", session_id)
        return answer

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert request.cookies["session"] == body["session_id"]
        by, count = body["action"]["by"], self._counts[body["session_id"]]
        count[0] += by
        return web.json_response({"observation": {"count": count[0]}, "reward": by, "done": count[0] >= count[1]})

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket, count, goal = web.WebSocketResponse(), 0, 3
        await socket.prepare(request)
        async for message in socket:
            asked = message.json()
            if asked["type"] == "reset":
                count, goal = 0, asked["data"].get("goal", 3)
            elif "by" not in asked["data"]:
                await socket.send_json({"type": "error", "data": {"message": "no by", "code": "VALIDATION_ERROR"}})
                continue
            else:
                count += asked["data"]["by"]
            data = {"observation": {"count": count}, "reward": asked["data"].get("by"), "done": count >= goal}
            await socket.send_json({"type": "observation", "data": data})
        return socket


async def answers(request: web.Request) -> web.Response:
    """Whatever the URL says: /wrong/STATUS/TEXT/reset."""
    return web.Response(status=int(request.match_info["status"]), text=request.match_info["text"])


async def is_silent(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    counting, app = Counting(), web.Application()
    app.add_routes(
        [
            web.post("/reset", counting.reset),
            web.post("/step", counting.step),
            web.get("/ws", counting.socket),
            web.post("/wrong/{status}/{text}/reset", answers),
            web.post("/silent/reset", is_silent),
        ]
    )
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def url_of(base: str, kind: str) -> str:
    return base if kind == "http" else f"{base.replace('http', 'ws')}/ws"


@pytest.mark.parametrize("kind", ["http", "socket"])
async def test_an_episode_is_reset_and_stepped_to_its_end_and_its_rewards_are_summed(kind: str) -> None:
    async with served() as base, Environment(url_of(base, kind)) as world:
        for goal in (3, 5):  # a second episode of the same session begins anew
            step = await world.reset(goal=goal)
            assert (step.observation, step.reward, step.done) == ({"count": 0}, 0.0, False)
            while not step.done:
                step = await world.step({"by": 2})
            assert (step.observation["count"], world.reward) == ({3: 4, 5: 6}[goal], {3: 4.0, 5: 6.0}[goal])


@pytest.mark.parametrize("kind", ["http", "socket"])
async def test_each_sample_has_a_session_of_its_own(kind: str) -> None:
    async def play(base: str, by: int) -> Any:
        async with Environment(url_of(base, kind)) as world:
            await world.reset(goal=100)
            return [(await world.step({"by": by})).observation["count"] for _ in range(3)]

    async with served() as base:
        assert await asyncio.gather(*(play(base, by) for by in (1, 2, 3))) == [[1, 2, 3], [2, 4, 6], [3, 6, 9]]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/wrong/200/hello", InvalidArgument),
        ("/wrong/200/{}", InvalidArgument),
        ('/wrong/200/{"observation": 1, "reward": "much"}', InvalidArgument),
        ('/wrong/200/{"observation": 1, "reward": NaN}', InvalidArgument),
        ("/wrong/422/no", InvalidArgument),
        ("/wrong/503/busy", Unavailable),
        ("/silent", DeadlineExceeded),
    ],
)
async def test_what_is_no_step_raises_and_is_never_a_reward(path: str, error: type[Exception]) -> None:
    async with served() as base, Environment(base + path, seconds=0.3) as world:
        with pytest.raises(error):
            await world.reset()


async def test_an_error_of_the_socket_raises_with_the_servers_words() -> None:
    async with served() as base, Environment(url_of(base, "socket")) as world:
        await world.reset()
        with pytest.raises(InvalidArgument, match="no by"):
            await world.step({})


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_server_that_is_away_is_named(scheme: str, unused_tcp_port: int) -> None:
    with pytest.raises(Unavailable, match=str(unused_tcp_port)):
        async with Environment(f"{scheme}://127.0.0.1:{unused_tcp_port}") as world:
            await world.reset()


async def test_a_url_of_another_kind_and_a_session_that_was_not_begun_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Environment("127.0.0.1:8000")
    with pytest.raises(FailedPrecondition):
        await Environment("http://127.0.0.1:1").reset()
