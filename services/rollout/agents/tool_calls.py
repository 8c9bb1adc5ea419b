"""Divides a response into the text before its tool calls and the calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.kit.tool_call import SplitResponse, ToolCall, divided, divided_by, load_parser, read_by, spoken_from
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from services.rollout.agents.dialects.core import Call

_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = 2.0**53
"""Below it, each whole number is a float."""
_WORKERS = 1
_LOAD_SECONDS = 120.0
_READ_SECONDS = 10.0

InMessage = tuple[str, str, list[Call]]
"""(what stands before the calls, the rest, the calls); the rest is empty where no call is well-formed."""


class ToolCallReader:
    """Reads calls as `headrace.hooks.kit.tool_call` does, or with one of SGLang's parsers in a worker process.

    That imports torch, which this service does without.
    """

    def __init__(self, parser: str | None = None) -> None:
        self._parser = parser
        self._pool = WorkerPool(_WORKERS) if parser else None

    async def start(self) -> None:
        """Raises ConfigError for a parser that SGLang does not have."""
        if self._pool and self._parser:
            try:
                await self._pool.run(load_parser, self._parser, timeout_seconds=_LOAD_SECONDS)
            except WorkerError as error:
                raise ConfigError(error.message, field="sglang.tool_call_parser") from error

    async def close(self) -> None:
        if self._pool:
            await self._pool.close()

    async def read(self, text: str, tools: Sequence[Any], *, in_thought: bool = False) -> InMessage:
        """A text that the parser cannot read in time calls nothing. `in_thought`: the prompt has opened a thought."""
        if not self._pool or not self._parser:
            return in_message(divided(text, tools=tools, in_thought=in_thought))
        start = spoken_from(text, in_thought=in_thought)
        work = (self._parser, text[start:], tools)
        try:
            before, found = await self._pool.run(read_by, *work, timeout_seconds=_READ_SECONDS)
        except WorkerError as error:
            log.warning("tool_calls_unread", parser=self._parser, message=error.message)
            return text, "", []
        return in_message(divided_by(text, text[:start] + before, found, tools))


def in_message(found: SplitResponse) -> InMessage:
    """The same with calls as clients are given them."""
    return found.before, found.rest, [_call(call) for call in found.calls]


def _call(call: ToolCall) -> Call:
    # A policy may write half of a surrogate pair, which is in no UTF-8: then everything is escaped.
    given = _with_plain_numbers(call.arguments)
    arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
    if _SURROGATE.search(arguments):
        arguments = json.dumps(given, allow_nan=False)
    return Call(f"call_{secrets.token_hex(12)}", call.name, arguments)


def _with_plain_numbers(value: Any) -> Any:
    """The same with 2 for 2.0: so a client in JavaScript sends it back, and is recognized by it."""
    match value:
        case dict():
            return {key: _with_plain_numbers(item) for key, item in value.items()}
        case list():
            return [_with_plain_numbers(item) for item in value]
        case float() if value.is_integer() and abs(value) < _EXACT:
            return int(value)
    return value
