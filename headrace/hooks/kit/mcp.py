"""MCP servers as tools of a generate function: a program that is started for it, or a server at a URL."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from headrace.errors import DeadlineExceeded, FailedPrecondition, HeadraceError, Unavailable
from headrace.hooks.kit.tools import MAX_CHARACTERS, SECONDS, Tool, Tools

_START_SECONDS = 30.0
_MOST_TOOLS = 1_000


@asynccontextmanager
async def mcp_tools(
    server: str | Sequence[str],
    *,
    seconds: float = SECONDS,
    max_characters: int = MAX_CHARACTERS,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Tools]:
    """The tools of an MCP server, `async with mcp_tools("python server.py") as tools`: a session of its own.

    `server` is a URL of its streamable HTTP, or a command, whose process ends with the block; `env` is added to a
    command's environment. `seconds` and `max_characters` bound each call. An error of a tool is its result, which the
    policy reads. Raises FailedPrecondition without the package mcp, Unavailable and DeadlineExceeded where the server
    does not start.
    """
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise FailedPrecondition("MCP servers need the package mcp: pip install 'headrace[mcp]'") from error
    where: Any = server
    if not isinstance(server, str) or not server.startswith(("http://", "https://")):
        command, *arguments = shlex.split(server) if isinstance(server, str) else server
        where = StdioServerParameters(command=command, args=arguments, env=dict(env or {}))
    async with _ungrouped(), AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_START_SECONDS):
                client = await stack.enter_async_context(Client(where))
                tools = Tools(seconds=seconds, max_characters=max_characters)
                for described in await _listed(client):
                    tools.add(
                        Tool(
                            name=described.name,
                            description=described.description or "",
                            parameters=described.input_schema,
                            function=partial(_called, client, described.name),
                            arguments=None,
                            seconds=seconds,
                            max_characters=max_characters,
                        )
                    )
        except TimeoutError as error:
            raise DeadlineExceeded(f"MCP server {server} did not answer within {_START_SECONDS:g} s") from error
        except HeadraceError:
            raise
        except Exception as error:
            first = _first(error)
            raise Unavailable(f"MCP server {server} did not start: {type(first).__name__}: {first}") from error
        yield tools


@asynccontextmanager
async def _ungrouped() -> AsyncIterator[None]:
    """What is raised in the block is raised as it is: the client's tasks wrap it in a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _listed(client: Any) -> Sequence[Any]:
    tools, cursor = list[Any](), None
    while len(tools) <= _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            return tools
    raise FailedPrecondition(f"an MCP server lists more than {_MOST_TOOLS} tools")


async def _called(client: Any, tool: str, /, **arguments: Any) -> str:
    """Raises RuntimeError with the server's words for an error."""
    result = await client.call_tool(tool, arguments)
    said = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
    if not said and result.structured_content is not None:
        said = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise RuntimeError(said)
    return said
