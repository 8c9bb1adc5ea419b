"""Attacks on a port of HTTP: the page of metrics, and the OpenAI endpoint."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence

from tests.hostile.surfaces import http2
from tests.hostile.surfaces.attack import CLIENT_HELLO, FLOOD, Attack, Maker, silent


def of_http(chance: random.Random, path: str) -> Attack:
    """One of those on a port of HTTP; `path` is one that answers a POST or a GET."""
    return chance.choice(_HTTP)(chance, path)


def _posted(path: str, body: bytes = b"{}", *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _pipelined(chance: random.Random, path: str) -> Attack:
    return Attack("pipelined", _posted(path) * FLOOD, FLOOD, reads=chance.random() < 0.5)


def _header_flood(chance: random.Random, path: str) -> Attack:
    many = [f"x-{n}: y" for n in range(chance.choice([500, 5_000]))]
    return Attack("header_flood", _posted(path, b"{}", *many))


def _large_header(chance: random.Random, path: str) -> Attack:
    return Attack(
        "large_header", _posted(path, b"{}", "Authorization: Bearer " + "x" * chance.choice([30_000, 200_000]))
    )


def _large_line(chance: random.Random, path: str) -> Attack:
    return Attack("large_line", _posted(path + "?" + "x" * 100_000))


def _large_body(chance: random.Random, path: str) -> Attack:
    length = chance.choice([17 << 20, 1 << 40])
    return Attack("large_body", _posted(path, b"x" * 1_000, length=length))


def _body_bomb(chance: random.Random, path: str) -> Attack:
    return Attack("body_bomb", _posted(path, gzip.compress(bytes(4 << 20)), "Content-Encoding: gzip"))


def _json_bomb(chance: random.Random, path: str) -> Attack:
    deep = b"[" * 50_000, b'{"a":' * 50_000, b'{"messages": ' + b"[" * 9_000, b'{"n": ' + b"9" * 50_000 + b"}"
    wide = b'{"messages": [' + b'{"role": "user", "content": ""},' * 5_000 + b"{}]}"
    return Attack("json_bomb", _posted(path, chance.choice([*deep, wide])))


def _wrong_lengths(chance: random.Random, path: str) -> Attack:
    head = chance.choice(
        [
            "Content-Length: -1",
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: 9\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked, chunked",
            "Transfer-Encoding: gzip",
            "Content-Length: 99999999999999999999999",
        ]
    )
    return Attack("wrong_lengths", f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + b"{}")


def _wrong_chunks(chance: random.Random, path: str) -> Attack:
    chunk = chance.choice(
        [b"zz\r\n", b"-1\r\n", b"fffffffffffffffffff\r\n", b"1;" + b"x" * 70_000, b"1\r\nab\r\n0\r\n\r\n"]
    )
    return Attack(
        "wrong_chunks", f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunk
    )


def _smuggled(chance: random.Random, path: str) -> Attack:
    """A request inside of another's body, for whoever reads its length differently."""
    hidden = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    head, body = chance.choice(
        [
            ("Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
            ("Transfer-Encoding: chunked\r\nContent-Length: 4", b"0\r\n\r\n"),
            ("Transfer-Encoding:\r\n chunked", b"0\r\n\r\n"),
            ("Transfer-Encoding : chunked", b"0\r\n\r\n"),
            ("Transfer-Encoding: \x0bchunked", b"0\r\n\r\n"),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"0\r\n\r\n"),
            ("Transfer-Encoding: chunked", b"0x0\r\n\r\n"),
            ("Transfer-Encoding: chunked", b"0\r\nContent-Length: 9\r\n\r\n"),
            ("Content-Length: +0", b""),
            ("Content-Length: 0, 0", b""),
            ("X: a\rContent-Length: 0", b""),
            ("X: a\0b", b""),
        ]
    )
    return Attack("smuggled", f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body + hidden)


def _packed_bodies(chance: random.Random, path: str) -> Attack:
    coding = chance.choice(["deflate", "br", "zstd", "x-gzip", "gzip, gzip", "identity", "x" * 1_000])
    return Attack("packed_bodies", _posted(path, gzip.compress(bytes(1 << 20)), f"Content-Encoding: {coding}"))


def _long_chunks(chance: random.Random, path: str) -> Attack:
    """A body of chunks without an end, as fast as it is read; or nonsense after the response to its head."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += chance.choice(["", "Content-Encoding: gzip\r\n"])
    chunks = chance.choice([b"1\r\nx\r\n" * 50_000, b"1;a=b\r\nx\r\n" * 20_000, b"10000\r\n" + bytes(1 << 16) + b"zz"])
    return Attack("long_chunks", head.encode() + b"\r\n" + chunks)


def _wrong_requests(chance: random.Random, path: str) -> Attack:
    lines: Sequence[bytes] = (
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%00%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://a:b@c/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"GET /metrics?" + b"name[]=x&" * 900 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text; version=a.b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: \xff\xfe\r\nX: \x01\r\n\r\n",
        b"GET /sessions/" + b"x" * 9_000 + b"/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        http2.opening(),
        CLIENT_HELLO,
        chance.randbytes(300),
    )
    return Attack("wrong_requests", chance.choice(lines))


def _wrong_json(chance: random.Random, path: str) -> Attack:
    body = chance.choice(
        [b"", b"null", b"{", b"\xff\xfe", b'"\\ud800"', b'{"messages": 1}', b"NaN", b'{"prompt": null}']
    )
    return Attack("wrong_json", _posted(path, body))


def _slow_head(chance: random.Random, path: str) -> Attack:
    return Attack("slow_head", b"POST / HTTP/1.1\r\n", drip=b"x: y\r\n")


def _slow_http_body(chance: random.Random, path: str) -> Attack:
    return Attack("slow_http_body", _posted(path, b"", length=1_000_000), drip=b"x")


def _expecting(chance: random.Random, path: str) -> Attack:
    """Asks whether it may send its body, and never does."""
    wanted = chance.choice(["100-continue", "100-Continue, 100-continue", "a-miracle"])
    length = chance.choice([2, 1 << 24])
    return Attack("expecting", _posted(path, b"", f"Expect: {wanted}", length=length), drip=b"\r\n")


def _slow_chunks(chance: random.Random, path: str) -> Attack:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return Attack("slow_chunks", head, drip=b"1\r\nx\r\n")


_HTTP: Sequence[Maker] = (
    *(_pipelined, _header_flood, _large_header, _large_line, _large_body, _body_bomb, _json_bomb, _wrong_lengths),
    *(_wrong_chunks, _wrong_requests, _wrong_json, _slow_head, _slow_http_body, _slow_chunks, silent),
    *(_smuggled, _packed_bodies, _long_chunks, _expecting),
)
