"""Asks the router's `/generate` for one response, from a user's function."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.rpc.retry import Backoff
from headrace.wire.routing_key import routed_by

if TYPE_CHECKING:
    import aiohttp


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
        except (aiohttp.ClientError, TimeoutError, _Away) as error:
            last = error
        await backoff.sleep(at_most=deadline - time.monotonic())
    raise Unavailable(f"{url} gave no response in {seconds:g} s: {last}")


class _Away(Exception):
    """The router, or the engine behind it, cannot answer now."""


async def _answer(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    async with http.post(url, json=body, headers=headers) as reply:
        if reply.status >= 500:
            raise _Away(f"status {reply.status}")
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
