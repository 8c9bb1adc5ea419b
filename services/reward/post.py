"""Asks another server for a score, over HTTP. Runs in a worker.

A server that is away, too busy or too slow raises an exception of Python's own, which the service reports as a failure
that may pass; an answer that will stay wrong raises InvalidArgument.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from headrace.errors import InvalidArgument
from headrace.rpc.proxies import is_here
from headrace.wire.checks import shown
from headrace.wire.limits import MAX_JSON_BYTES

_AT_ONCE = 64
_threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="post")
_MAY_PASS = (408, 425, 429)


async def post(url: str, body: Mapping[str, Any], *, seconds: float, key: str | None = None) -> Any:
    """The JSON that `url` answers to the JSON of `body`.

    Raises OSError for a server that cannot be asked now, InvalidArgument for what it refuses or answers.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads, _post, url, body, seconds, key)


def _opener(url: str) -> OpenerDirector:
    """Servers elsewhere are asked through the proxy of the environment; `no_proxy` names the run's own machines."""
    return build_opener(*([ProxyHandler({})] if is_here(url) else []))


def _post(url: str, body: Mapping[str, Any], seconds: float, key: str | None) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = Request(url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310 - a rule checks the scheme
    try:
        with _opener(url).open(request, timeout=seconds) as answer:
            text = answer.read(MAX_JSON_BYTES + 1)
    except HTTPError as error:
        said = error.read(400).decode(errors="replace")
        if error.code >= 500 or error.code in _MAY_PASS:
            raise ConnectionError(f"{url} answered {error.code}: {said}") from None
        raise InvalidArgument(f"{url} answered {error.code}: {shown(said)}") from None
    except URLError as error:
        raise ConnectionError(f"{url} cannot be reached: {error.reason}") from None
    if len(text) > MAX_JSON_BYTES:
        raise InvalidArgument(f"{url} answered more than {MAX_JSON_BYTES} bytes: it must answer a score, and no more")
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgument(f"{url} answered {shown(text.decode(errors='replace'))}, which is no JSON") from None
