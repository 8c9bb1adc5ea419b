"""Attacks on a port of gRPC."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence

from tests.hostile.surfaces import http2
from tests.hostile.surfaces.attack import CLIENT_HELLO, FLOOD, Attack, Maker, silent
from tests.hostile.surfaces.http2 import frame

_EVERYWHERE = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no/Such",
)
"""What every port of gRPC has besides its service, and what none has."""


def of_grpc(chance: random.Random, path: str) -> Attack:
    """One of those on a port of gRPC; `path` is that of an RPC that answers at once."""
    return chance.choice(_GRPC)(chance, path)


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


def _idle(chance: random.Random, path: str) -> Attack:
    return Attack("idle", http2.opening(), drip=b"")


def _garbage(chance: random.Random, path: str) -> Attack:
    return Attack(
        "garbage", chance.choice([chance.randbytes(200), CLIENT_HELLO, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 999])
    )


def _half_closed(chance: random.Random, path: str) -> Attack:
    """The caller's side of a call ends where no message does; the path is a stream's, too."""
    to = chance.choice([path, *_EVERYWHERE])
    start = frame(http2.HEADERS, http2.END_HEADERS, 1, http2.header_block(http2.call_headers(to)))
    end = frame(http2.DATA, http2.END_STREAM, 1)
    ends: Sequence[bytes] = (
        end,
        frame(http2.DATA, http2.END_STREAM, 1, b"\0\0\0"),
        frame(http2.DATA, http2.END_STREAM, 1, bytes(5) * 2),
        frame(http2.DATA, 0, 1, bytes(5)) + end + frame(http2.DATA, http2.END_STREAM, 1, bytes(5)),
        frame(http2.DATA, 0, 1) * 10 * FLOOD + end,
        frame(http2.DATA, 0, 1, b"\2\0\0\0\0") + end,
        frame(http2.DATA, 0, 1, bytes(4))
        + frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, http2.header_block([("x", "y")])),
        frame(http2.HEADERS, http2.END_HEADERS, 1, http2.header_block(http2.call_headers(path))),
        frame(http2.RST_STREAM, 0, 1, bytes(4)) + frame(http2.DATA, http2.END_STREAM, 1, bytes(5)),
    )
    return _opened("half_closed", start + chance.choice(ends))


def _no_window(chance: random.Random, path: str) -> Attack:
    """Calls and watches whose answers the server may not send, of a caller that stays."""
    no_window = frame(http2.SETTINGS, 0, 0, b"\0\4" + bytes(4))
    paths = [path, "/grpc.health.v1.Health/Watch"]
    calls = b"".join(http2.call(paths[n // 2 % 2], n) for n in _streams())
    return Attack("no_window", http2.PREFACE + no_window + calls, FLOOD, drip=b"\0")


_GRPC: Sequence[Maker] = (
    *(_rapid_reset, _call_flood, _continuations, _many_headers, _table_bomb, _large_metadata, _pings, _settings),
    *(_windows, _wrong_frames, _wrong_calls, _packed_bomb, _wrong_length, _garbage),
    *(_half_closed, _no_window),
    *(_slow_body, _slow_preface, _slow_headers, silent, _idle),
)
