"""Requests of users' functions over HTTP: the router's `/generate`, and `post` and `get` of slime's name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.rpc.net import routed_by
from headrace.rpc.retry import Backoff

_POST_SECONDS = 1_800.0
_AGAIN_SECONDS = 1.0
_SHOWN_CHARACTERS = 1_000


async def ask_engine(
    url: str, tokens: Sequence[int], params: Mapping[str, Any], *, seconds: float, routing_key: str | None = None
) -> dict[str, Any]:
    """Returns the response's meta_info. A router that is away is asked again until `seconds` have passed.

    Raises InvalidArgument with the engine's words when it refuses the request, and Unavailable at the deadline.
    """
    body = {"input_ids": list(tokens), "sampling_params": dict(params), "return_logprob": True}
    deadline, backoff = time.monotonic() + seconds, Backoff()
    last: Exception | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            found = await _requested("POST", url, body, routed_by(routing_key), seconds=left)
        except EngineUnavailable as error:
            last = error
            await backoff.sleep(at_most=deadline - time.monotonic())
            continue
        if not isinstance(found, dict) or not isinstance(meta_info := found.get("meta_info"), dict):
            raise InvalidArgument(f"{url} answered something without meta_info: {found!r:.80}")
        return meta_info
    raise Unavailable(f"{url} gave no response in {seconds:g} s: {last}")


async def post(
    url: str, payload: Mapping[str, Any] | None, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Sends JSON, and returns the response's JSON, or its text. No proxy is used.

    A server that cannot be reached, or fails with a status of 408, 429 or 500 and more, is asked again each second.
    Raises InvalidArgument with the server's words where it refuses the request, and Unavailable after `max_retries`
    tries.
    """
    return await _asked("POST", url, payload or {}, max_retries, headers)


async def get(url: str, max_retries: int = 60) -> Any:
    """Returns the JSON, or the text, at the URL; errors and retries are those of `post`."""
    return await _asked("GET", url, None, max_retries, None)


async def _asked(method: str, url: str, payload: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
    last: Exception | None = None
    for attempt in range(max(1, max_retries)):
        if attempt:
            await asyncio.sleep(_AGAIN_SECONDS)
        try:
            return await _requested(method, url, payload, headers, seconds=_POST_SECONDS)
        except EngineUnavailable as error:
            last = error
    raise Unavailable(f"{url} did not answer in {max(1, max_retries)} tries: {last}")


class EngineUnavailable(Exception):
    """The router, the engine behind it, or another server cannot answer now."""


async def _requested(method: str, url: str, payload: Any, headers: Mapping[str, str] | None, *, seconds: float) -> Any:
    """Returns the response's JSON, or its text. Raises EngineUnavailable, or InvalidArgument for a refusal."""
    import aiohttp  # the reward service loads hooks as well, and is installed without it

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), trust_env=False) as http,
            http.request(method, url, json=payload, headers=headers) as reply,
        ):
            text = await reply.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from error
    if reply.status >= 400:
        said = text[:_SHOWN_CHARACTERS]
        if reply.status >= 500 or reply.status in (408, 429):
            raise EngineUnavailable(f"status {reply.status}: {said}")
        raise InvalidArgument(f"{url} refused the request ({reply.status}): {said}")
    try:
        return json.loads(text)
    except ValueError:
        return text
