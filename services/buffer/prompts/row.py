"""One row of a prompt file becomes a prompt. Errors name the file and the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.images.prompts import with_images
from headrace.prompts.label import set_label
from headrace.prompts.row import chat_message, content_of, ordered_json, parse_row, required, value_at
from headrace.wire.checks import shown
from headrace.wire.limits import MAX_PROMPT_BYTES
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import FileSource

_KINDS: dict[type, str] = {dict: "an object", list: "an array", int: "an integer"}


@dataclass(frozen=True, slots=True)
class RowReader:
    """`name` stands for the file in the ids of its prompts: <name>:<line>@<epoch>."""

    source: FileSource
    name: str

    def from_line(self, line: Any, number: int, epoch: int) -> Prompt:
        """A line of JSONL or a row of a table, counted from 1. Raises InvalidArgument naming path and line."""
        try:
            row = parse_row(line)
        except InvalidArgument as error:
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
    content = content_of(row, source.input_key)
    if source.image_key:
        content = with_images(content, row, source.image_key, Path(source.path).parent)
    if isinstance(content, str):
        prompt.text = content
    else:
        prompt.messages.messages.extend(map(chat_message, content))
    if source.label_key:
        set_label(prompt, required(row, source.label_key))
    if (metadata := _typed(row, source.metadata_key, dict)) is not None:
        prompt.metadata_json = ordered_json(metadata)
    if (tools := _typed(row, source.tool_key, list)) is not None:
        prompt.tools_json = ordered_json(tools)
    if (priority := _typed(row, source.priority_key, int)) is not None:
        prompt.priority = priority
    return prompt


def _typed(row: dict[str, Any], key: str | None, kind: type) -> Any:
    """None without the key, or where the row has no value of it."""
    value = value_at(row, key) if key else None
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{key!r} must be {_KINDS[kind]}, is {shown(value)}")
    return value
