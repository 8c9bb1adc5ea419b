"""A row of a file of prompts, read by one rule for training, evaluation, `submit` and checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.wire.checks import shown


def parse_row(line: str | bytes) -> dict[str, Any]:
    """A line of JSONL. Raises InvalidArgument unless it is a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"must be a JSON object, is {shown(row)}")
    return row


def content_of(row: Mapping[str, Any], key: str) -> str | list[dict[str, Any]]:
    """The prompt: text, or one chat message or more. Raises InvalidArgument."""
    content = required(row, key)
    if isinstance(content, str) or (isinstance(content, list) and content and all(map(_is_message, content))):
        return content
    raise InvalidArgument(
        f"{key!r} must be text or an array of chat messages, each an object with a role, is {shown(content)}"
    )


def required(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise InvalidArgument(f"lacks {key!r}, has {shown(sorted(row))}")
    return row[key]


def ordered_json(value: Any) -> str:
    """Compact JSON in the order of its keys, which chat templates show to the model. Raises InvalidArgument for NaN."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{shown(value)} cannot be written as JSON: {error}") from error


def chat_message(message: Mapping[str, Any]) -> sample_pb2.ChatMessage:
    """A message with a role; whatever else it has, and content that is no text, is kept as JSON."""
    content = message.get("content")
    is_text = isinstance(content, str | None)
    extra = {key: value for key, value in message.items() if key != "role" and not (key == "content" and is_text)}
    return sample_pb2.ChatMessage(
        role=message["role"],
        content=content if isinstance(content, str) else "",
        extra_json=ordered_json(extra) if extra else "",
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
