"""What a stranger sends: each attack is bytes to send at once, or a few bytes and then one now and then.

`requests` is how many requests are in it, or frames of a flood.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.hostile.surfaces import http2
from tests.hostile.surfaces.http2 import frame

FLOOD = 100
_EVERYWHERE = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no/Such",
)
"""What every port of gRPC has besides its service, and what none has."""
_CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303") + bytes(32)


@dataclass(frozen=True, slots=True)
class Attack:
    """`drip` is sent a byte at a time afterwards, without an end; `reads` is False for who never reads the answers."""

    name: str
    data: bytes
    requests: int = 1
    drip: bytes = b""
    reads: bool = True


Maker = Callable[[random.Random, str], Attack]


def of_grpc(chance: random.Random, path: str) -> Attack:
    """One of those on a port of gRPC; `path` is that of an RPC that answers at once."""
    return chance.choice(_GRPC)(chance, path)


def of_http(chance: random.Random, path: str) -> Attack:
    """One of those on a port of HTTP; `path` is one that answers a POST or a GET."""
    return chance.choice(_HTTP)(chance, path)


def _opened(name: str, data: bytes, requests: int = 1, *, reads: bool = True) -> Attack:
    return Attack(name, http2.opening() + data, requests, reads=reads)


def _streams() -> range:
    return range(1, 2 * FLOOD, 2)


def _rapid_reset(chance: random.Random, path: str) -> Attack:
    """CVE-2023-44487, of one method or of several: each has a queue of its own. The request is there, or not yet."""
    reset, message = (8).to_bytes(4, "big"), chance.choice([b"", None])
    paths = chance.choice([[path], [path, *_EVERYWHERE]])
    each = (
        http2.call(paths[n // 2 % len(paths)], n, message) + frame(http2.RST_STREAM, 0, n, reset) for n in _streams()
    )
    return _opened("rapid_reset", b"".join(each), FLOOD)


def _call_flood(chance: random.Random, path: str) -> Attack:
    return _opened("calls_unread", b"".join(http2.call(path, n) for n in _streams()), FLOOD, reads=False)


def _continuations(chance: random.Random, path: str) -> Attack:
    start = frame(http2.HEADERS, 0, 1, http2.header_block(http2.call_headers(path)))
    more = frame(http2.CONTINUATION, 0, 1, http2.header_block([("x", "y" * 4_000)]))
    return _opened("continuations", start + more * FLOOD, FLOOD)


def _many_headers(chance: random.Random, path: str) -> Attack:
    many = [(f"x-{n}", "y") for n in range(2_000)]
    block = http2.header_block([*http2.call_headers(path), *many])
    parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    kinds = [http2.HEADERS, *[http2.CONTINUATION] * (len(parts) - 1)]
    last = len(parts) - 1
    frames = [
        frame(kind, http2.END_HEADERS if n == last else 0, 1, part)
        for n, (kind, part) in enumerate(zip(kinds, parts, strict=True))
    ]
    return _opened("many_headers", b"".join(frames))


def _table_bomb(chance: random.Random, path: str) -> Attack:
    block = http2.header_block(http2.call_headers(path)) + http2.indexed_bomb(8_000)
    return _opened("table_bomb", frame(http2.HEADERS, http2.END_HEADERS, 1, block))


def _large_metadata(chance: random.Random, path: str) -> Attack:
    return _opened("large_metadata", http2.call(path, 1, b"", ("x", "y" * chance.randint(8_000, 15_000))))


def _pings(chance: random.Random, path: str) -> Attack:
    return _opened("pings", frame(http2.PING, 0, 0, bytes(8)) * 10 * FLOOD, 10 * FLOOD, reads=chance.random() < 0.5)


def _settings(chance: random.Random, path: str) -> Attack:
    one = frame(http2.SETTINGS, 0, 0, b"\0\4" + chance.randint(0, 2**31 - 1).to_bytes(4, "big"))
    return _opened("settings", one * 10 * FLOOD, 10 * FLOOD, reads=chance.random() < 0.5)


def _windows(chance: random.Random, path: str) -> Attack:
    size = chance.choice([0, 1, 2**31 - 1])
    update = frame(http2.WINDOW_UPDATE, 0, 0, size.to_bytes(4, "big"))
    return _opened("windows", http2.call(path, 1) + update * FLOOD, FLOOD)


def _wrong_frames(chance: random.Random, path: str) -> Attack:
    made = [
        frame(
            chance.randrange(16), chance.randrange(256), chance.randrange(2**31), chance.randbytes(chance.randrange(64))
        )
        for _ in range(20)
    ]
    return _opened("wrong_frames", http2.call(path, 1) + b"".join(made))


def _wrong_calls(chance: random.Random, path: str) -> Attack:
    wrong = chance.choice(
        [
            [("grpc-timeout", "9" * 20 + "H")],
            [("grpc-encoding", "gzip")],
            [("grpc-encoding", "x" * 100)],
            [("authorization", "Bearer " + "x" * 4_000)],
            [(":path", "/again")],
            [("grpc-status-details-bin", "%%%")],
            [("x-bin", "not base64 !")],
            [("content-type", "text/html")],
        ]
    )
    message = chance.choice([b"", None, chance.randbytes(chance.randrange(200)), b"\xff" * 64])
    return _opened("wrong_calls", http2.call(chance.choice([path, "/", "", f"{path}x", "/a/b/c"]), 1, message, *wrong))


def _packed_bomb(chance: random.Random, path: str) -> Attack:
    packed = gzip.compress(bytes(4 << 20))
    block = http2.header_block(http2.call_headers(path, ("grpc-encoding", "gzip")))
    body = b"\1" + len(packed).to_bytes(4, "big") + packed
    return _opened(
        "packed_bomb", frame(http2.HEADERS, http2.END_HEADERS, 1, block) + frame(http2.DATA, http2.END_STREAM, 1, body)
    )


def _wrong_length(chance: random.Random, path: str) -> Attack:
    start = frame(http2.HEADERS, http2.END_HEADERS, 1, http2.header_block(http2.call_headers(path)))
    length = chance.choice([2**32 - 1, 300 << 20, 1])
    return _opened("wrong_length", start + frame(http2.DATA, http2.END_STREAM, 1, b"\0" + length.to_bytes(4, "big")))


def _slow_body(chance: random.Random, path: str) -> Attack:
    start = frame(http2.HEADERS, http2.END_HEADERS, 1, http2.header_block(http2.call_headers(path)))
    claimed = frame(http2.DATA, 0, 1, b"\0" + (200 << 20).to_bytes(4, "big"))
    return Attack("slow_body", http2.opening() + start + claimed, drip=frame(http2.DATA, 0, 1, b"x"))


def _slow_preface(chance: random.Random, path: str) -> Attack:
    return Attack("slow_preface", http2.PREFACE[:3], drip=http2.PREFACE[3:])


def _slow_headers(chance: random.Random, path: str) -> Attack:
    start = frame(http2.HEADERS, 0, 1, http2.header_block(http2.call_headers(path)))
    return Attack("slow_headers", http2.opening() + start, drip=frame(http2.CONTINUATION, 0, 1, b""))


def _silent(chance: random.Random, path: str) -> Attack:
    return Attack("silent", b"", drip=b"")


def _idle(chance: random.Random, path: str) -> Attack:
    return Attack("idle", http2.opening(), drip=b"")


def _garbage(chance: random.Random, path: str) -> Attack:
    return Attack(
        "garbage", chance.choice([chance.randbytes(200), _CLIENT_HELLO, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 999])
    )


_GRPC: Sequence[Maker] = (
    *(_rapid_reset, _call_flood, _continuations, _many_headers, _table_bomb, _large_metadata, _pings, _settings),
    *(_windows, _wrong_frames, _wrong_calls, _packed_bomb, _wrong_length, _garbage),
    *(_slow_body, _slow_preface, _slow_headers, _silent, _idle),
)


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
        _CLIENT_HELLO,
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


def _slow_chunks(chance: random.Random, path: str) -> Attack:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return Attack("slow_chunks", head, drip=b"1\r\nx\r\n")


_HTTP: Sequence[Maker] = (
    *(_pipelined, _header_flood, _large_header, _large_line, _large_body, _body_bomb, _json_bomb, _wrong_lengths),
    *(_wrong_chunks, _wrong_requests, _wrong_json, _slow_head, _slow_http_body, _slow_chunks, _silent),
)
