"""An engine's address for trying a generate function: every request gets the same short answer, in SGLang's shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

ANSWER = "7"
_TOKENS = (22, 2)
_MAX_BODY_BYTES = 16 << 20


@asynccontextmanager
async def stand_in_engine() -> AsyncIterator[int]:
    """Its port on 127.0.0.1. Knows `/generate` and, below any path, `/v1/chat/completions` and `/v1/completions`."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        size = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0)
        body = await reader.readexactly(min(size, _MAX_BODY_BYTES))
        answer = json.dumps(_answer(head.split()[1], _asked(body))).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
            + f"Content-Length: {len(answer)}\r\n\r\n".encode()
            + answer
        )
        await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError, IndexError):
        pass  # what does not speak HTTP is the function's own matter: it sees the connection end
    finally:
        writer.close()


def _asked(body: bytes) -> Any:
    return json.loads(body) if body else {}


def _answer(path: str, asked: Any) -> Any:
    message = {"role": "assistant", "content": ANSWER}
    if path.endswith("/v1/chat/completions"):
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    if path.endswith("/v1/completions"):
        return {"choices": [{"index": 0, "text": ANSWER, "finish_reason": "stop"}]}
    if isinstance(asked, dict) and isinstance(asked.get("text"), list):
        return [_generated() for _ in asked["text"]]
    return _generated()


def _generated() -> Any:
    return {
        "text": ANSWER,
        "output_ids": list(_TOKENS),
        "meta_info": {
            "id": "check",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 5,
            "completion_tokens": len(_TOKENS),
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, token, None] for token in _TOKENS],
        },
    }
