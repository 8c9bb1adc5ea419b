"""Requests of users' functions over HTTP: the router's `/generate`, and `post` and `get` of slime's name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.rpc.net import routed_by
from headrace.rpc.retry import Backoff

if TYPE_CHECKING:
    import aiohttp

_POST_SECONDS = 1_800.0
_AGAIN_SECONDS = 1.0
_SHOWN_CHARACTERS = 1_000


async def ask_engine(
    url: str, tokens: Sequence[int], params: Mapping[str, Any], *, seconds: float, routing_key: str | None = None
) -> dict[str, Any]:
    """Returns the answer's meta_info. A router that is away is asked again until `seconds` have passed.

    Raises InvalidArgument with the engine's words when it refuses the request, and Unavailable at the deadline.
    """
    import aiohttp  # the reward service loads hooks as well, and is installed without it

    body = {"input_ids": list(tokens), "sampling_params": dict(params), "return_logprob": True}
    deadline, backoff = time.monotonic() + seconds, Backoff()
    last: Exception | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=left)) as http:
                return await _answer(http, url, body, routed_by(routing_key))
        except (aiohttp.ClientError, TimeoutError, EngineUnavailable) as error:
            last = error
        await backoff.sleep(at_most=deadline - time.monotonic())
    raise Unavailable(f"{url} gave no response in {seconds:g} s: {last}")


class EngineUnavailable(Exception):
    """The router, or the engine behind it, cannot answer now."""


async def _answer(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    async with http.post(url, json=body, headers=headers) as reply:
        if reply.status >= 500:
            raise EngineUnavailable(f"status {reply.status}")
        if reply.status >= 400:
            said = (await reply.content.read(1000)).decode(errors="replace")
            raise InvalidArgument(f"the engine refused the request ({reply.status}): {said}")
        content = await reply.read()
    found = _parsed(url, content)
    if not isinstance(found, dict) or not isinstance(meta_info := found.get("meta_info"), dict):
        raise InvalidArgument(f"{url} answered something without meta_info: {content[:80]!r}")
    return meta_info


def _parsed(url: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise InvalidArgument(f"{url} answered something that is no JSON: {content[:80]!r}") from error


async def post(
    url: str, payload: Mapping[str, Any] | None, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Sends JSON, and returns the answer's JSON, or its text. No proxy is used.

    A server that cannot be reached, or fails with a status of 500 or more, is asked again each second. Raises
    InvalidArgument with the server's words where it refuses the request, and Unavailable after `max_retries` tries.
    """
    return await _asked("POST", url, payload or {}, max_retries, headers)


async def get(url: str, max_retries: int = 60) -> Any:
    """Returns the JSON, or the text, at the URL; errors and retries are those of `post`."""
    return await _asked("GET", url, None, max_retries, None)


async def _asked(method: str, url: str, payload: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
    import aiohttp  # the reward service loads hooks as well, and is installed without it

    last: object = None
    for attempt in range(max(1, max_retries)):
        if attempt:
            await asyncio.sleep(_AGAIN_SECONDS)
        try:
            timeout = aiohttp.ClientTimeout(total=_POST_SECONDS)
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as http,
                http.request(method, url, json=payload, headers=headers) as reply,
            ):
                if reply.status < 400:
                    return await _content(reply)
                said = (await reply.text(errors="replace"))[:_SHOWN_CHARACTERS]
                if reply.status < 500 and reply.status not in (408, 429):
                    raise InvalidArgument(f"{url} refused the request ({reply.status}): {said}")
                last = f"status {reply.status}: {said}"
        except (aiohttp.ClientError, TimeoutError) as error:
            last = f"{type(error).__name__}: {error}"
    raise Unavailable(f"{url} did not answer in {max(1, max_retries)} tries: {last}")


async def _content(reply: aiohttp.ClientResponse) -> Any:
    text = await reply.text()
    try:
        return json.loads(text)
    except ValueError:
        return text
