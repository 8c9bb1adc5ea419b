"""HTTP to engines and routers, with one time limit around a whole exchange and a limit on a response's bytes.

A limit on each read would never end a response that drips, and a response without a limit fills memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from headrace.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from services.rollout.engine.replies import BadAnswer, T, decode

CONTROL_ANSWER_BYTES = 16 << 20
"""Enough for the checksums of all tensors of the largest models."""

_CONNECT_SECONDS = 5.0
_SHOWN_BYTES = 500
_BEGUN_AT_ONCE = 16  # in one pass of the event loop: a group may ask for a thousand, and others wait for the loop
_KEEPALIVE_SECONDS = 4.0  # uvicorn, which serves SGLang, closes a connection that was idle for 5 s
# What is compressed has no size before it is unpacked.
_HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response with its whole body."""

    path: str
    status: int
    body: bytes

    def decode(self, kind: type[T]) -> T:
        """Returns its JSON as that kind. Raises the error that the response means, and BadAnswer."""
        return decode(self.success(), kind)

    def success(self) -> bytes:
        """Returns the body. Raises the error that the response means."""
        self.require_success()
        return self.body

    def require_success(self) -> None:
        """FailedPrecondition and InvalidArgument are the server's refusals, Unavailable is its failure."""
        if 200 <= self.status < 300:
            return
        text = self.body[:_SHOWN_BYTES].decode(errors="replace")
        if self.status == 400 and '"success":false' in text.replace(" ", ""):
            raise FailedPrecondition(f"{self.path} was refused: {text}", reason="ENGINE_REFUSED")
        if 400 <= self.status < 500 and self.status not in (408, 429):
            raise InvalidArgument(f"{self.path} answered {self.status}: {text}", reason="ENGINE_REFUSED")
        raise Unavailable(f"{self.path} answered {self.status}: {text}", reason="ENGINE_UNREACHABLE")


class Http:
    """One server at http://host:port."""

    def __init__(self, url: str, *, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.url = url
        # Not httpx: its pool looks at all connections for each request and each answer, quadratic in requests at once.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={**_HEADERS, **headers},
            auto_decompress=False,
        )
        self._beginning = asyncio.Semaphore(_BEGUN_AT_ONCE)

    async def close(self) -> None:
        await self._http.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        seconds: float,
        max_bytes: int = CONTROL_ANSWER_BYTES,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Reply:
        """Returns the whole response. Raises DeadlineExceeded, Unavailable, and BadAnswer for more than `max_bytes`."""
        with self._mapped(path, seconds):
            async with asyncio.timeout(seconds), self._sent(method, path, body, seconds, headers) as response:
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    _require_size(path, len(content), max_bytes)
                return Reply(path, response.status, bytes(content))

    async def events(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        seconds: float,
        max_bytes: int,
        max_events: int,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncGenerator[bytes, None]:
        """Yields the data of an event stream's events, each of at most `max_bytes`. Raises as `request` does."""
        end = time.monotonic() + seconds
        async with contextlib.AsyncExitStack() as stack:
            with self._mapped(path, seconds):
                async with asyncio.timeout(seconds):
                    response = await stack.enter_async_context(self._sent("POST", path, body, seconds, headers))
                if not 200 <= response.status < 300:
                    async with asyncio.timeout(end - time.monotonic()):
                        Reply(path, response.status, await _start_of(response)).require_success()
            num_events, line, chunks = 0, bytearray(), response.content.iter_any()
            while True:
                with self._mapped(path, seconds):
                    async with asyncio.timeout(end - time.monotonic()):
                        chunk = await anext(chunks, None)
                if chunk is None:
                    return
                first, *others = chunk.split(b"\n")
                line += first
                for following in others:
                    _require_size(path, len(line), max_bytes)
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        num_events += 1
                        if num_events > max_events:
                            raise BadAnswer("too_many_events", f"{path} sent more than {max_events} events")
                        yield bytes(data)
                    line = bytearray(following)
                _require_size(path, len(line), max_bytes)

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(seconds, _CONNECT_SECONDS))
        async with self._beginning:
            await asyncio.sleep(0)
        data = None if body is None else msgspec.json.encode(body)
        async with self._http.request(
            method, f"{self.url}{path}", data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise BadAnswer("encoded", f"{path} answered with a Content-Encoding that was not asked for")
            yield response

    @contextlib.contextmanager
    def _mapped(self, path: str, seconds: float) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientError as error:  # a connection that takes too long is one of them, and a TimeoutError
            raise Unavailable(
                f"{self.url}{path}: {type(error).__name__} {error}", reason="ENGINE_UNREACHABLE"
            ) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.url}{path} did not answer within {seconds:g} s") from error


async def _start_of(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= _SHOWN_BYTES:
            break
    return bytes(content)


def _require_size(path: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BadAnswer("too_large", f"{path} answered with more than {max_bytes} bytes")
