"""Tools of a real MCP server, started as a program and reached over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="requirements/mcp.txt is not installed")

from headrace.errors import AlreadyExists, Unavailable
from headrace.hooks.kit import ToolCall, Tools, mcp_tools
from headrace.process.linux import descendants

SERVER = Path(__file__).parents[2] / "support" / "mcp_server.py"
KINDS = ("program", "http")
RED = {"COLOR": "red"}


@contextlib.asynccontextmanager
async def opened(kind: str, port: int, *, seconds: float, max_characters: int = 100) -> AsyncIterator[Tools]:
    server: str | list[str] = [sys.executable, str(SERVER)]
    async with contextlib.AsyncExitStack() as stack:
        if kind == "http":
            await stack.enter_async_context(served(port))
            server = f"http://127.0.0.1:{port}/mcp"
        opening = mcp_tools(server, seconds=seconds, max_characters=max_characters, env=RED)
        yield await stack.enter_async_context(opening)


@contextlib.asynccontextmanager
async def served(port: int) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(SERVER), str(port), env={**os.environ, **RED})
    try:
        await listening(port)
        yield
    finally:
        process.kill()
        await process.wait()


async def listening(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


def call(tool: str, /, **arguments: object) -> ToolCall:
    return ToolCall({"name": tool, "arguments": arguments})


@pytest.mark.parametrize("kind", KINDS)
async def test_tools_of_a_server_are_described_and_called(kind: str, unused_tcp_port: int) -> None:
    async with opened(kind, unused_tcp_port, seconds=5.0, max_characters=100) as tools:
        schemas = {each["function"]["name"]: each["function"] for each in tools.schemas()}
        assert schemas["multiply"]["description"] == "The product of two numbers."
        assert schemas["multiply"]["parameters"]["properties"]["a"]["type"] == "integer"
        assert await tools.call(call("multiply", a=12, b=34)) == "408"
        assert await tools.call(call("note", text="one")) == "one"
        assert await tools.call(call("note", text="two")) == "one two"
        assert await tools.call(call("variable", name="COLOR")) == "red"
        assert "it does not work" in await tools.call(call("fail"))
        assert (await tools.call(call("multiply", a="no number", b=1))).startswith("error")
        assert "500 characters" in await tools.call(call("repeat", text="abcde", times=100))
        assert "there is no tool" in await tools.call(call("multiplied"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_hangs_is_ended_and_the_policy_reads_it(kind: str, unused_tcp_port: int) -> None:
    async with opened(kind, unused_tcp_port, seconds=0.5) as tools:
        assert "longer than 0.5 s" in await tools.call(call("hang"))


async def test_own_tools_stand_beside_those_of_a_server() -> None:
    async with mcp_tools([sys.executable, str(SERVER)]) as tools:

        @tools.register
        def add(a: int, b: int) -> int:
            return a + b

        assert await tools.call(call("add", a="1", b=2)) == "3"
        with pytest.raises(AlreadyExists):
            tools.register(name="multiply")(add)


async def test_each_block_has_a_program_of_its_own_which_ends_with_it() -> None:
    async def noted(text: str) -> str:
        async with mcp_tools(f"{sys.executable} {SERVER}") as tools:
            return await tools.call(call("note", text=text))

    assert await asyncio.gather(noted("a"), noted("b")) == ["a", "b"]
    assert not [pid for pid in descendants(os.getpid()) if str(SERVER).encode() in _command(pid)]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def test_what_is_raised_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with mcp_tools([sys.executable, str(SERVER)]):
            raise ZeroDivisionError


@pytest.mark.parametrize("server", ["/nowhere/server", "/bin/false", "http://127.0.0.1:PORT/mcp"])
async def test_a_server_that_does_not_start_is_named(server: str, unused_tcp_port: int) -> None:
    server = server.replace("PORT", str(unused_tcp_port))
    with pytest.raises(Unavailable, match=server):
        async with mcp_tools(server):
            pass
