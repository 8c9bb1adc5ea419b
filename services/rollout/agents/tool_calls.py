"""Divides a response into the text before its tool calls and the calls, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from headrace.hooks.kit.tool_call import ToolCall, divided
from services.rollout.agents.messages import Function, ToolCallMessage


def with_messages(text: str, parser: str | None, tools: Sequence[Any]) -> tuple[str, str, list[ToolCallMessage]]:
    """(what stands before the calls, the rest, the calls); the rest is empty where no call is well-formed."""
    found = divided(text, parser=parser, tools=tools)
    return found.before, found.rest, [_message(call) for call in found.calls]


def _message(call: ToolCall) -> ToolCallMessage:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCallMessage(Function(call.name, arguments), id=f"call_{secrets.token_hex(12)}")
