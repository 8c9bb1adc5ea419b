"""A reward server of the user's own: `--rm-url` is sent prompt, response and label, and answers the reward.

The request is `{"prompt", "response", "label", "metadata"}`, the answer a number, an object of numbers (with
`--reward-key`), or `{"reward": …}` or `{"score": …}` around either.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, Reward
from headrace.hooks.reward import checked_reward
from headrace.limits import MAX_JSON_BYTES, shown
from headrace.rpc.proxies import is_here
from headrace.score import ScoreItem

# Asks another server for a score, over HTTP. Runs in a worker.
# A server that is away, too busy or too slow raises an exception of Python's own, which the service reports as a
# failure that may pass; an answer that will stay wrong raises InvalidArgument. A redirect is not followed: urllib would
# send the key to wherever it points.

_AT_ONCE = 64
_threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="post")
_MAY_PASS = (408, 425, 429)


class _NoRedirects(HTTPRedirectHandler):
    """Makes an HTTPError of each redirect."""

    def redirect_request(self, *_: Any) -> None:
        return None


async def post(
    url: str,
    body: Mapping[str, Any],
    *,
    seconds: float,
    key: str | None = None,
    cookies: CookieJar | None = None,
    most_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """The JSON that `url` answers to the JSON of `body`. `cookies` of the server are sent and kept.

    Raises OSError for a server that cannot be asked now, InvalidArgument for what it refuses or answers.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _threads, _post, url, body, seconds, key, cookies, most_bytes
    )


def _opener(url: str, cookies: CookieJar | None) -> OpenerDirector:
    """Servers elsewhere are asked through the proxy of the environment; `no_proxy` names the run's own machines."""
    return build_opener(_NoRedirects, HTTPCookieProcessor(cookies), *([ProxyHandler({})] if is_here(url) else []))


def _post(
    url: str, body: Mapping[str, Any], seconds: float, key: str | None, cookies: CookieJar | None, most_bytes: int
) -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    # A rule of the job checks the scheme.
    request = Request(url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310
    try:
        with _opener(url, cookies).open(request, timeout=seconds) as answer:
            text = answer.read(most_bytes + 1)
    except HTTPError as error:
        if 300 <= error.code < 400:
            there = shown(error.headers.get("location") or "nowhere")
            raise InvalidArgument(
                f"{url} answered {error.code}, a redirect to {there}. Redirects are not followed: "
                "give the address that answers"
            ) from None
        said = error.read(400).decode(errors="replace")
        if error.code >= 500 or error.code in _MAY_PASS:
            raise ConnectionError(f"{url} answered {error.code}: {said}") from None
        raise InvalidArgument(f"{url} answered {error.code}: {shown(said)}") from None
    except URLError as error:
        raise ConnectionError(f"{url} cannot be reached: {error.reason}") from None
    if len(text) > most_bytes:
        raise InvalidArgument(f"{url} answered more than {most_bytes} bytes: it must answer a score, and no more")
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgument(f"{url} answered {shown(text.decode(errors='replace'))}, which is no JSON") from None


async def score(item: ScoreItem, args: HookArgs) -> Reward | None:
    """None where the server abstains, with null.

    Raises InvalidArgument without --rm-url and for an answer that is no reward, OSError while nobody answers.
    """
    if args.rm_url is None:
        raise InvalidArgument("scorer remote_rm has no server to ask: set --rm-url")
    asked = {
        "prompt": item.prompt,
        "response": item.response,
        "label": item.label,
        "metadata": dict(item.metadata),
    }
    answer = await post(args.rm_url, asked, seconds=args.reward_timeout_seconds)
    if (given := _inner(answer)) is None:
        return None
    reward = checked_reward(args.rm_url, given)
    if isinstance(reward, str):
        raise InvalidArgument(reward.removeprefix("hook "))
    return reward


def _inner(answer: Any) -> Any:
    if isinstance(answer, dict):
        for name in ("reward", "score"):
            if isinstance(answer.get(name, ""), int | float | dict | None) and len(answer) == 1:
                return answer[name]
    return answer
