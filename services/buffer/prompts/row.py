"""One row of a prompt file becomes a prompt. Errors name the file and the line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.label import label_text
from headrace.wire.limits import MAX_PROMPT_BYTES
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import FileSource

_KINDS: dict[type, str] = {dict: "an object", list: "an array", int: "an integer"}


@dataclass(frozen=True, slots=True)
class RowReader:
    """`name` stands for the file in the ids of its prompts: <name>:<line>@<epoch>."""

    source: FileSource
    name: str

    def from_line(self, line: bytes, number: int, epoch: int) -> Prompt:
        """A line of JSONL, counted from 1. Raises InvalidArgument naming path and line."""
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"must be a JSON object, is {_shown(row)}")
        except (ValueError, TypeError, RecursionError) as error:
            raise self._bad(number, error) from error
        return self.from_row(row, number, epoch)

    def from_row(self, row: dict[str, Any], number: int, epoch: int) -> Prompt:
        """A row, counted from 1. Raises InvalidArgument naming path and line."""
        try:
            prompt = _to_prompt(self.source, row)
        except (ValueError, TypeError, RecursionError, InvalidArgument) as error:
            raise self._bad(number, error) from error
        prompt.prompt_id = f"{self.name}:{number}@{epoch}"
        if prompt.ByteSize() > MAX_PROMPT_BYTES:
            raise self._bad(
                number, ValueError(f"the prompt has {prompt.ByteSize()} bytes, may have {MAX_PROMPT_BYTES}")
            )
        return Prompt(prompt.prompt_id, prompt.SerializeToString(deterministic=True), prompt.priority)

    def _bad(self, number: int, error: Exception) -> InvalidArgument:
        return InvalidArgument(
            f"{self.source.path}, line {number}: {error}: correct it, or set skip_bad_lines",
            field="config.files.path",
            reason="BAD_LINE",
            path=self.source.path,
            line=str(number),
        )


def _to_prompt(source: FileSource, row: dict[str, Any]) -> sample_pb2.Prompt:
    prompt = sample_pb2.Prompt()
    content = _value(row, source.input_key)
    if isinstance(content, str):
        prompt.text = content
    elif isinstance(content, list) and content:
        prompt.messages.messages.extend(_to_message(turn) for turn in content)
    else:
        raise TypeError(f"{source.input_key!r} must be text or an array of chat messages, is {_shown(content)}")
    if source.label_key:
        prompt.label = label_text(_value(row, source.label_key)) or ""
    if source.metadata_key and row.get(source.metadata_key) is not None:
        prompt.metadata_json = _dump(_typed(row, source.metadata_key, dict))
    if source.tool_key and row.get(source.tool_key) is not None:
        prompt.tools_json = _dump(_typed(row, source.tool_key, list))
    if source.priority_key and row.get(source.priority_key) is not None:
        prompt.priority = _typed(row, source.priority_key, int)
    return prompt


def _to_message(turn: Any) -> sample_pb2.ChatMessage:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise TypeError(f"a chat message must be an object with a role, is {_shown(turn)}")
    content = turn.get("content")
    extra = {k: v for k, v in turn.items() if k != "role" and not (k == "content" and isinstance(v, str | None))}
    return sample_pb2.ChatMessage(
        role=turn["role"],
        content=content if isinstance(content, str) else "",
        extra_json=_dump(extra) if extra else "",
    )


def _value(row: dict[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise TypeError(f"lacks {key!r}, has {sorted(row)}")
    return row[key]


def _typed(row: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(row[key], kind):
        raise TypeError(f"{key!r} must be {_KINDS[kind]}, is {_shown(row[key])}")
    return row[key]


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)[:80]
