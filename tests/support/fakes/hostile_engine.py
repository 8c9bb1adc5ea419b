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


def changed(change: Callable[[Reply, Reply], object]) -> Spoil:
    """A good answer after `change(answer, its meta_info)`."""

    def spoil(reply: Reply) -> Reply:
        change(reply, reply["meta_info"])
        return reply

    return spoil


def body(data: bytes) -> Spoil:
    """Other bytes."""
    return lambda _: data


def _one_token_more(reply: Reply, meta: Reply) -> None:
    reply["output_ids"].append(1)
    meta["output_token_logprobs"].append([-0.5, 1, None])
    meta["weight_versions"][-1]["end"] += 1


def _no_token(reply: Reply, meta: Reply) -> None:
    reply["output_ids"], meta["output_token_logprobs"], meta["weight_versions"] = [], [], []


def _beyond_the_vocabulary(reply: Reply, meta: Reply) -> None:
    reply["output_ids"][2] = meta["output_token_logprobs"][2][1] = VOCAB_SIZE


def _log_probs(change: Callable[[list[Any]], Any]) -> Spoil:
    return changed(lambda _, meta: meta.update(output_token_logprobs=change(meta["output_token_logprobs"])))


def _first_log_prob(value: float) -> Spoil:
    return _log_probs(lambda pairs: [[value, *pairs[0][1:]], *pairs[1:]])


def _finish(value: Any) -> Spoil:
    return changed(lambda _, meta: meta.update(finish_reason=value))


def _spans(*items: tuple[str | None, int, int]) -> Spoil:
    """Other weight_versions; None stands for the name of the engine's own."""
    return changed(
        lambda _, meta: meta.update(
            weight_versions=[
                {"version": name or meta["weight_version"], "start": start, "end": end} for name, start, end in items
            ]
        )
    )


def _without(key: str) -> Spoil:
    return changed(lambda _, meta: meta.pop(key))


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

NUM_TOKENS = 8  # asked for by the tests

HOSTILE: Mapping[str, Hostile] = {
    "no log-probs": Hostile("no_log_probs", _without("output_token_logprobs")),
    "fewer log-probs": Hostile("log_prob_count", _log_probs(lambda pairs: pairs[:-1])),
    "log-prob NaN": Hostile("not_json", _first_log_prob(float("nan"))),
    "log-prob positive": Hostile("log_prob", _first_log_prob(0.5)),
    "log-probs in another order": Hostile("log_probs_of_other_tokens", _log_probs(lambda pairs: pairs[::-1])),
    "log-probs without ids": Hostile("output_token_logprobs", _log_probs(lambda pairs: [pair[:1] for pair in pairs])),
    "output_ids as text": Hostile("output_ids", changed(lambda reply, _: reply.update(output_ids="1 2 3"))),
    "token id beyond the vocabulary": Hostile("token_id", changed(_beyond_the_vocabulary)),
    "one token more than asked": Hostile("too_many_tokens", changed(_one_token_more)),
    "finished without a token": Hostile("no_tokens", changed(_no_token)),
    "no finish_reason": Hostile("finish_reason", _without("finish_reason")),
    "finish_reason unknown": Hostile("finish_reason", _finish({"type": "tired"})),
    "aborted by its failure": Hostile(
        "aborted_with_status", _finish({"type": "abort", "message": "CUDA error", "status_code": 500})
    ),
    "no weight_versions": Hostile("weight_versions", _without("weight_versions")),
    "a gap": Hostile("weight_versions", _spans((None, 0, 3), (None, 4, 8))),
    "a version never published": Hostile("unknown_version", _spans((None, 0, 4), ("7", 4, 8))),
    "success false": Hostile("not_successful", changed(lambda reply, _: reply.update(success=False))),
    "an error": Hostile("error", body(b'{"error": {"message": "out of memory", "code": 500}}')),
    "status 400 to everything": Hostile("refused", body(b'{"error": {"message": "no"}}'), status=400),
    "status 500": Hostile("", status=500),
    "not JSON": Hostile("not_json", body(b"<html>")),
    "nested": Hostile("not_an_object", body(b"[" * 60_000)),
    "no meta_info": Hostile("meta_info", changed(lambda reply, _: reply.pop("meta_info"))),
    "packed": Hostile("encoded", lambda _: gzip.compress(b" " * 9_000_000), headers={"Content-Encoding": "gzip"}),
    "endless": Hostile("too_large", raw=Raw(_OK + b"Content-Length: 300000000\r\n\r\n", b" " * 65536)),
    "closed": Hostile("", raw=Raw()),
    "closed in the middle": Hostile("", raw=Raw(_OK + b'Content-Length: 500\r\n\r\n{"text": ')),
    "not HTTP": Hostile("", raw=Raw(b"SSH-2.0-OpenSSH_9.2\r\n")),
}
