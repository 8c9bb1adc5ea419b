"""A small MCP server: `python mcp_server.py`, or `python mcp_server.py PORT` over HTTP."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small")
notes: list[str] = []


@server.tool()
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


@server.tool()
def note(text: str) -> str:
    """Keeps a text, and returns all that are kept."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("it does not work")


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment, or nothing."""
    return os.environ.get(name, "")


@server.tool()
def repeat(text: str, times: int) -> str:
    """A text many times."""
    return text * times


@server.tool()
def hang() -> str:
    """Ends after half a minute."""
    time.sleep(30)
    return "late"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
