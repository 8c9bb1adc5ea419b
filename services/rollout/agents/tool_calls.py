"""Divides a response into the text before its tool calls and the calls."""

from __future__ import annotations

import json
import secrets

from headrace.hooks.kit.tool_call import ToolCall, extract_tool_calls
from services.rollout.agents.messages import Function, ToolCallMessage

_MARKS = (
    "<tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
)


def divided(text: str) -> tuple[str, str, list[ToolCallMessage]]:
    """(what stands before the calls, the rest, the calls); the rest is empty where no call is well-formed."""
    starts = [position for mark in _MARKS if (position := text.find(mark)) >= 0]
    if not starts and text.lstrip().startswith("{"):
        starts = [0]  # Llama 3 writes nothing but the call
    start = min(starts, default=len(text))
    calls = extract_tool_calls(text[start:])
    return (text[:start], text[start:], [_message(call) for call in calls]) if calls else (text, "", [])


def _message(call: ToolCall) -> ToolCallMessage:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCallMessage(Function(call.name, arguments), id=f"call_{secrets.token_hex(12)}")
