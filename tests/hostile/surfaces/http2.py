"""Frames of HTTP/2 as bytes (RFC 9113), right or wrong. Headers are written literally (RFC 7541, 6.2.2)."""

from __future__ import annotations

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def opening() -> bytes:
    """What a client says first."""
    return PREFACE + frame(SETTINGS, 0, 0)


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def indexed_bomb(references: int) -> bytes:
    """One header of 4,000 bytes, kept in the table of the connection, and named again by one byte each time."""
    return b"\x40" + _text("x-bomb") + _text("b" * 3_900) + b"\xbe" * references


def call_headers(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """Those of a gRPC call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


def call(path: str, stream: int, message: bytes | None = b"", *more: tuple[str, str]) -> bytes:
    """A whole unary call; None leaves its message out."""
    block = header_block(call_headers(path, *more))
    if message is None:
        return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    return _integer(len(data)) + data


def _integer(value: int) -> bytes:
    """With a prefix of seven bits."""
    if value < 127:
        return bytes([value])
    out, value = bytearray([127]), value - 127
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])
