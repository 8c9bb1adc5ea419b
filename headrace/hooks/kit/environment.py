"""Servers of environments that are played by `reset` and `step`, as OpenEnv's: a session of its own for each sample."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import aiohttp

_SECONDS = 60.0
_MOST_BYTES = 16 << 20
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answered: `reply` is all of it."""

    observation: Any
    reward: float
    done: bool
    reply: Mapping[str, Any]


class Environment:
    """One session with a server, `async with Environment(url) as world`. Every call ends within `seconds`.

    A URL of `ws://` is OpenEnv's socket, `ws://HOST:PORT/ws`. For `http://`, `reset` and `step` are POSTs of JSON below
    the URL; cookies of the server and the fields `keep` of its reply to `reset` go along with each step. What the
    server refuses, and what it does not answer, raises: the sample fails.
    """

    def __init__(self, url: str, *, seconds: float = _SECONDS, keep: tuple[str, ...] = ("session_id",)) -> None:
        """Raises InvalidArgument for another kind of URL."""
        if url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise InvalidArgument(
                f"environment {url!r}: give a URL that begins with http://, https://, ws:// or wss://"
            )
        self.reward = 0.0
        """The sum of all steps' rewards."""
        self._url = url.rstrip("/")
        self._seconds = seconds
        self._keep = keep
        self._kept: dict[str, Any] = {}
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> Self:
        import aiohttp  # the reward service loads the kit as well, and is installed without it

        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True), trust_env=False)
        if self._url.startswith("ws"):
            try:
                self._socket = await self._bounded(
                    self._http.ws_connect(self._url, max_msg_size=_MOST_BYTES), "connect"
                )
            except BaseException:
                await self._http.close()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def reset(self, **arguments: Any) -> Step:
        """Begins an episode, with the server's own arguments, such as `seed`."""
        self.reward = 0.0
        reply = await self._asked("reset", arguments)
        self._kept = {name: reply[name] for name in self._keep if name in reply}
        return self._step("reset", reply)

    async def step(self, action: Any) -> Step:
        """Takes an action, in the form that the server wants: mostly an object."""
        return self._step(
            "step", await self._asked("step", action if self._socket else {"action": action, **self._kept})
        )

    def _step(self, what: str, reply: Mapping[str, Any]) -> Step:
        if "observation" not in reply:
            raise self._wrong(what, "no observation", reply)
        reward, done = reply.get("reward"), reply.get("done", False)
        if isinstance(reward, bool) or reward is None:
            reward = float(reward or 0.0)
        if not isinstance(reward, int | float) or not math.isfinite(reward) or not isinstance(done, bool):
            raise self._wrong(what, "a reward that is no number, or a done that is not true or false", reply)
        self.reward += reward
        return Step(reply["observation"], float(reward), done, reply)

    def _wrong(self, what: str, has: str, reply: object) -> InvalidArgument:
        return InvalidArgument(f"{self._url} answered {what} with {has}: {str(reply)[:_SHOWN_CHARACTERS]}")

    async def _asked(self, what: str, body: Any) -> Mapping[str, Any]:
        if self._http is None:
            raise FailedPrecondition("write `async with Environment(url) as world`: the session begins there")
        text = await self._bounded(self._by_socket(what, body) if self._socket else self._by_post(what, body), what)
        try:
            reply = json.loads(text)
        except ValueError:
            reply = None
        if isinstance(reply, dict) and self._socket:
            if reply.get("type") == "error":
                raise self._wrong(what, "an error", reply.get("data"))
            reply = reply.get("data")
        if not isinstance(reply, dict):
            raise self._wrong(what, "no JSON object", text)
        return reply

    async def _by_socket(self, what: str, body: Any) -> str:
        assert self._socket is not None
        await self._socket.send_json({"type": what, "data": body})
        return await self._socket.receive_str()

    async def _by_post(self, what: str, body: Any) -> str:
        assert self._http is not None
        text = bytearray()
        async with self._http.post(f"{self._url}/{what}", json=body) as reply:
            async for part in reply.content.iter_any():
                text += part
                if len(text) > _MOST_BYTES:
                    raise InvalidArgument(f"{self._url}/{what} answered more than {_MOST_BYTES >> 20} MiB")
        said = text.decode(errors="replace")
        if reply.status >= 500:
            raise Unavailable(f"{self._url}/{what} failed ({reply.status}): {said[:_SHOWN_CHARACTERS]}")
        if reply.status >= 400:
            raise InvalidArgument(
                f"{self._url}/{what} refused the request ({reply.status}): {said[:_SHOWN_CHARACTERS]}"
            )
        return said

    async def _bounded(self, call: Any, what: str) -> Any:
        import aiohttp

        try:
            async with asyncio.timeout(self._seconds):
                return await call
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._url} did not answer {what} within {self._seconds:g} s") from error
        except (aiohttp.ClientError, aiohttp.WSMessageTypeError) as error:
            raise Unavailable(f"{self._url} did not answer {what}: {type(error).__name__}: {error}") from error
