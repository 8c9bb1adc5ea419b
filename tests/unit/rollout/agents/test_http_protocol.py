"""Requests that two readers would read differently, and what comes after a response has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.limits import MAX_SMALL_HTTP_CHUNKS, SMALL_HTTP_CHUNK_BYTES
from services.rollout.agents.server import EndpointServer

SOON = 60.0
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(*headers: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", *headers, b"", b""])


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Answers each path with its name, and a POST before its body has come."""

    async def answer(request: Request) -> Response:
        return PlainTextResponse(f"answer of {request.url.path}")

    server = EndpointServer(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    await server.start()
    yield int(server.url.rpartition(":")[2])
    await server.stop()


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"Content-Length: %d" % (5 + len(HIDDEN)), b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + HIDDEN,
        post(b"Transfer-Encoding: chunked", b"Content-Length: 4") + b"0\r\n\r\n" + HIDDEN,
        post(b"Transfer-Encoding:\r\n chunked", b"Content-Length: 4") + b"0\r\n\r\n" + HIDDEN,
        post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity") + b"0\r\n\r\n" + HIDDEN,
        post(b"Transfer-Encoding: xchunked") + HIDDEN,
        post(b"Transfer-Encoding : chunked") + b"0\r\n\r\n" + HIDDEN,
        post(b"Content-Length: 0", b"Content-Length: %d" % len(HIDDEN)) + HIDDEN,
        post(b"Content-Length: +0") + HIDDEN,
        post(b"X: a\rContent-Length: 0") + HIDDEN,
        post(b"Transfer-Encoding: chunked") + b"0x0\r\n\r\n" + HIDDEN,
    ],
)
async def test_a_request_of_two_lengths_hides_no_other(port: int, request_bytes: bytes) -> None:
    reader, writer = await connected(port)
    writer.write(request_bytes)
    async with asyncio.timeout(SOON):
        answers = await reader.read()
    writer.close()
    assert b"HTTP/1.1 400 Bad Request" in answers
    assert b"answer of /hidden" not in answers


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;a=b\r\nx\r\n", b"3f\r\n%b\r\n" % (b"x" * 63)])
async def test_a_body_of_small_chunks_ends_with_its_connection(port: int, chunk: bytes) -> None:
    reader, writer = await connected(port)
    writer.write(CHUNKED + chunk * (MAX_SMALL_HTTP_CHUNKS + 1))
    async with asyncio.timeout(SOON):
        answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\nx\r\n" * MAX_SMALL_HTTP_CHUNKS,
        b"40\r\n%b\r\n" % (b"x" * SMALL_HTTP_CHUNK_BYTES) * 4 * MAX_SMALL_HTTP_CHUNKS,
    ],
)
async def test_a_connection_takes_bodies_of_chunks_one_after_another(port: int, body: bytes) -> None:
    reader, writer = await connected(port)
    async with asyncio.timeout(SOON):
        for _ in range(3):
            writer.write(CHUNKED + body + b"0\r\n\r\n")
            await reader.readuntil(b"answer of /")
    writer.close()


async def test_nonsense_after_a_response_has_begun_ends_the_connection_and_nothing_fails(port: int) -> None:
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    reader, writer = await connected(port)
    writer.write(CHUNKED)
    async with asyncio.timeout(SOON):
        await reader.readuntil(b"answer of /")
        writer.write(b"zz\r\n")
        assert await reader.read() == b""
    writer.close()
    assert not failed


async def test_nonsense_in_a_request_that_is_being_answered_is_answered_once(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await connected(port)
    writer.write(CHUNKED + b"zz\r\n")
    async with asyncio.timeout(SOON):
        answers = await reader.read()
    writer.close()
    assert answers.startswith(b"HTTP/1.1 400 Bad Request")
    assert answers.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.exc_info]
