"""Engines that answer /generate badly, over real sockets, and everything else as a good engine does."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from services.rollout.engine.api import SamplingParams
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import EngineResponse
from tests.support.fakes.fake_engine import VOCAB_SIZE, FakeEngine
from tests.support.fakes.fake_fleet import WIRE, RememberedRouting

Reply = dict[str, Any]
Spoil = Callable[[Reply], Reply | bytes]


@dataclass(frozen=True)
class Raw:
    """Bytes on the connection instead of an answer of HTTP; it is closed after them."""

    data: bytes = b""
    endless: bytes = b""
    """Then these, again and again."""


@dataclass(frozen=True)
class Hostile:
    """`spoil` changes a good answer; `kind` is how the bad one is counted, "" where it is no answer at all."""

    kind: str
    spoil: Spoil | None = None
    status: int = 200
    headers: Mapping[str, str] | None = None
    raw: Raw | None = None


class HostileEngine(FakeEngine):
    """Every answer of /generate is spoiled; without `hostile` it is a good one."""

    def __init__(self, hostile: Hostile | None = None, *, token_seconds: float = 0.0) -> None:
        super().__init__(WIRE, token_seconds=token_seconds)
        self._hostile = hostile

    async def _generate(self, request: web.Request, body: Reply) -> web.StreamResponse:
        if self._hostile is None:
            return await super()._generate(request, body)
        if self._hostile.raw is not None:
            return await self._speak(request, self._hostile.raw)
        good = await super()._generate(request, body)
        assert isinstance(good, web.Response)
        assert isinstance(good.body, bytes)
        spoiled: Reply | bytes = json.loads(good.body)
        if self._hostile.spoil:
            spoiled = self._hostile.spoil(json.loads(good.body))
        content = spoiled if isinstance(spoiled, bytes) else json.dumps(spoiled).encode()
        return web.Response(body=content, status=self._hostile.status, headers=self._hostile.headers)

    async def _speak(self, request: web.Request, raw: Raw) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(raw.data)  # type: ignore[attr-defined]  # it is a socket's
        with contextlib.suppress(ConnectionError):
            while raw.endless and not request.transport.is_closing():
                request.transport.write(raw.endless)  # type: ignore[attr-defined]
                await asyncio.sleep(0)
        request.transport.close()
        return web.Response()


class TakingTurns(EngineClient):
    """Stands where the router does: one engine in routing after the other."""

    def __init__(self, routing: RememberedRouting, **options: Any) -> None:
        self._routing = routing
        self._options = options
        self._clients: dict[str, EngineClient] = {}
        self._turn = 0

    async def generate(self, tokens: Sequence[int], params: SamplingParams, **request: Any) -> EngineResponse:
        return await self._next().generate(tokens, params, **request)

    def stream(
        self, tokens: Sequence[int], params: SamplingParams, **request: Any
    ) -> AsyncGenerator[EngineResponse, None]:
        return self._next().stream(tokens, params, **request)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _next(self) -> EngineClient:
        urls = sorted(self._routing.urls) or ["http://127.0.0.1:9"]
        self._turn += 1
        url = urls[self._turn % len(urls)]
        if url not in self._clients:
            self._clients[url] = EngineClient(url, **self._options)
        return self._clients[url]


def put(*path: str | int, value: Any) -> Spoil:
    """The answer with another value at a place."""

    def spoil(reply: Reply) -> Reply:
        inner: Any = reply
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return reply

    return spoil


def without(*path: str) -> Spoil:
    """The answer without a key."""

    def spoil(reply: Reply) -> Reply:
        inner: Any = reply
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return reply

    return spoil


def body(data: bytes) -> Spoil:
    """Other bytes."""
    return lambda _: data


def spans(*items: tuple[object, object, object]) -> Spoil:
    """Other weight_versions; the name "own" stands for the engine's."""

    def spoil(reply: Reply) -> Reply:
        own = reply["meta_info"]["weight_version"]
        reply["meta_info"]["weight_versions"] = [
            {"version": own if name == "own" else name, "start": start, "end": end} for name, start, end in items
        ]
        return reply

    return spoil


def _longer(by: int) -> Spoil:
    """More tokens than were asked for, in every list."""

    def spoil(reply: Reply) -> Reply:
        meta = reply["meta_info"]
        reply["output_ids"] += [1] * by
        meta["output_token_logprobs"] += [[-0.5, 1, None]] * by
        meta["weight_versions"][-1]["end"] += by
        return reply

    return spoil


def _empty(reply: Reply) -> Reply:
    reply["output_ids"], reply["meta_info"]["output_token_logprobs"] = [], []
    reply["meta_info"]["weight_versions"] = []
    return reply


def _log_prob(value: Any) -> Spoil:
    return put("meta_info", "output_token_logprobs", 3, 0, value=value)


def _token(value: Any) -> Spoil:
    def spoil(reply: Reply) -> Reply:
        reply["output_ids"][2] = reply["meta_info"]["output_token_logprobs"][2][1] = value
        return reply

    return spoil


def _finish(value: Any) -> Spoil:
    return put("meta_info", "finish_reason", value=value)


def _pairs(change: Callable[[list[Any]], Any]) -> Spoil:
    def spoil(reply: Reply) -> Reply:
        meta = reply["meta_info"]
        meta["output_token_logprobs"] = change(meta["output_token_logprobs"])
        return reply

    return spoil


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

NUM_TOKENS = 8  # asked for by the tests

HOSTILE: Mapping[str, Hostile] = {
    # log-probs
    "no log-probs": Hostile("no_log_probs", without("meta_info", "output_token_logprobs")),
    "log-probs null": Hostile("no_log_probs", put("meta_info", "output_token_logprobs", value=None)),
    "fewer log-probs": Hostile("log_prob_count", _pairs(lambda pairs: pairs[:-1])),
    "one log-prob": Hostile("log_prob_count", _pairs(lambda pairs: pairs[:1])),
    "log-prob NaN": Hostile("not_json", _log_prob(float("nan"))),
    "log-prob positive": Hostile("log_prob", _log_prob(0.5)),
    "log-prob 1e308": Hostile("log_prob", _log_prob(1e308)),
    "log-prob as text": Hostile("output_token_logprobs", _log_prob("-0.5")),
    "log-prob null": Hostile("log_prob", _log_prob(None)),
    "log-probs of other tokens": Hostile("log_probs_of_other_tokens", _pairs(lambda p: [[-0.1, 1, None] for _ in p])),
    "log-probs in another order": Hostile("log_probs_of_other_tokens", _pairs(lambda pairs: pairs[::-1])),
    "log-probs without ids": Hostile("output_token_logprobs", _pairs(lambda pairs: [pair[:1] for pair in pairs])),
    # tokens
    "no output_ids": Hostile("output_ids", without("output_ids")),
    "output_ids as text": Hostile("output_ids", put("output_ids", value="1 2 3")),
    "token id negative": Hostile("token_id", _token(-1)),
    "token id beyond the vocabulary": Hostile("token_id", _token(VOCAB_SIZE)),
    "token id true": Hostile("output_ids", _token(True)),
    "one token more than asked": Hostile("too_many_tokens", _longer(1)),
    "finished without a token": Hostile("no_tokens", _empty),
    # the end
    "no finish_reason": Hostile("finish_reason", without("meta_info", "finish_reason")),
    "finish_reason null": Hostile("finish_reason", _finish(None)),
    "finish_reason as text": Hostile("finish_reason", _finish("stop")),
    "finish_reason unknown": Hostile("finish_reason", _finish({"type": "tired"})),
    "aborted by its failure": Hostile(
        "aborted_with_status", _finish({"type": "abort", "message": "CUDA error", "status_code": 500})
    ),
    # weights
    "no weight_versions": Hostile("weight_versions", without("meta_info", "weight_versions")),
    "weight_versions as text": Hostile("weight_versions", put("meta_info", "weight_versions", value="0")),
    "a gap": Hostile("weight_versions", spans(("own", 0, 3), ("own", 4, 8))),
    "an overlap": Hostile("weight_versions", spans(("own", 0, 5), ("own", 4, 8))),
    "too long": Hostile("weight_versions", spans(("own", 0, 9))),
    "the name a number": Hostile("weight_versions", spans((0, 0, 8))),
    "the name of a megabyte": Hostile("weight_versions", spans(("x" * 20_000, 0, 8))),
    "a version never published": Hostile("unknown_version", spans(("own", 0, 4), ("7", 4, 8))),
    "a name never given": Hostile("unknown_version", spans(("0.deadbeef.engine-0", 0, 8))),
    # refusals
    "success false": Hostile("not_successful", put("success", value=False)),
    "success as text": Hostile("success", put("success", value="yes")),
    "an error": Hostile("error", body(b'{"error": {"message": "out of memory", "code": 500}}')),
    "status 400 to everything": Hostile("refused", body(b'{"error": {"message": "no"}}'), status=400),
    "status 404": Hostile("refused", status=404),
    "status 500": Hostile("", status=500),
    "status 429": Hostile("", status=429),
    "status 302": Hostile("", status=302, headers={"Location": "/generate"}),
    # bytes
    "empty": Hostile("not_json", body(b"")),
    "not JSON": Hostile("not_json", body(b"<html>")),
    "not UTF-8": Hostile("meta_info", body(b'{"text": "\xff\xfe"}')),
    "nested": Hostile("not_an_object", body(b"[" * 60_000)),
    "many digits": Hostile("meta_info", body(b'{"meta_info": ' + b"9" * 50_000 + b"}")),
    "a list": Hostile("not_an_object", body(b"[]")),
    "no meta_info": Hostile("meta_info", without("meta_info")),
    "packed": Hostile("encoded", lambda _: gzip.compress(b" " * 9_000_000), headers={"Content-Encoding": "gzip"}),
    "endless": Hostile("too_large", raw=Raw(_OK + b"Content-Length: 300000000\r\n\r\n", b" " * 65536)),
    "closed": Hostile("", raw=Raw()),
    "closed in the middle": Hostile("", raw=Raw(_OK + b'Content-Length: 500\r\n\r\n{"text": ')),
    "not HTTP": Hostile("", raw=Raw(b"SSH-2.0-OpenSSH_9.2\r\n")),
}
