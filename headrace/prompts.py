"""Rows of prompt files: content and label, by one rule for training, evaluation, submit, data sources and checks."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.limits import MAX_PROMPT_LINE_BYTES, MAX_TABLE_BYTES, canonical, shown

if TYPE_CHECKING:
    from headrace.api.rollout.v1 import rollout_pb2

LABEL_IS_JSON = "label_is_json"
"""The key of `hook_json` that says so: users' functions are given the object or the list itself."""

Label = str | dict[str, Any] | list[Any] | None


def set_label(prompt: sample_pb2.Prompt, value: Any) -> None:
    """Gives the prompt its label, and notes whether that is an object or a list. Raises InvalidArgument."""
    if (text := label_text(value)) is None:
        return
    prompt.label = text
    if marked := label_mark(value):
        prompt.hook_json = canonical({**json.loads(prompt.hook_json or "{}"), **marked})


def label_mark(value: Any) -> dict[str, bool]:
    """What belongs into `hook_json` beside the text of a label: nothing for text, numbers and truth values."""
    return {LABEL_IS_JSON: True} if isinstance(_plain(value), dict | list) else {}


def label_for_hooks(text: str | None, hook_fields: Mapping[str, Any]) -> Label:
    """The label as users' functions see it: the object or list that a row holds, and all others as text."""
    if text is None or hook_fields.get(LABEL_IS_JSON) is not True:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict | list) else text


def label_as_given(value: Any) -> Label:
    """A label of a user's own code: objects and lists of plain values, all others as text. Raises InvalidArgument."""
    text = label_text(value)
    return label_for_hooks(text, label_mark(value))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def label_text(value: Any, field: str = "the label") -> str | None:
    """The label as text. Raises InvalidArgument, which calls it `field`.

    Text stays as it is, None is no label, anything else becomes JSON with sorted keys and no blanks. Equal values have
    equal bytes, whatever the order of their keys and wherever they came from: `true`, `[1,2.5]`.
    """
    if value is None or isinstance(value, str):
        return value
    try:
        return canonical(_plain(value))  # also of a number, an array or a tensor of a library
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{field} is neither text nor JSON: {error}: give text, or finite numbers, lists and objects of them"
        ) from error


_BOM = b"\xef\xbb\xbf"
_SEPARATED = (".csv", ".tsv")
_PEEKED_BYTES = 4096
_KINDS: Mapping[type, str] = {dict: "an object", list: "an array", int: "an integer"}


def is_table(file: BinaryIO, path: str | os.PathLike[str]) -> bool:
    """True for CSV, by the file's name, and for one JSON array. The file is read from its start, and left there."""
    if os.fspath(path).lower().endswith(_SEPARATED):
        return True
    lines = iter(lambda: file.readline(MAX_PROMPT_LINE_BYTES + 1), b"")
    first = next((line for line in lines if line.removeprefix(_BOM).strip()), b"").removeprefix(_BOM).strip()
    is_array = first.startswith(b"[") and (not _is_json(first) or not file.read(_PEEKED_BYTES).strip())
    file.seek(0)
    return is_array


def table(file: BinaryIO, path: str | os.PathLike[str]) -> list[Any] | None:
    """All rows of a file that is one JSON array, or CSV with a header; None for a file of JSON lines.

    The file is read from its start, and stands there again where it has lines. Raises InvalidArgument for a file that
    is too large to be read as a whole, or is neither.
    """
    if not is_table(file, path):
        return None
    is_separated = os.fspath(path).lower().endswith(_SEPARATED)
    content = file.read(MAX_TABLE_BYTES + 1).removeprefix(_BOM)
    if len(content) > MAX_TABLE_BYTES:
        raise InvalidArgument(
            f"{path} is larger than {MAX_TABLE_BYTES} bytes, and is not read line by line: write it as JSONL, one "
            "JSON object a line, or as Parquet"
        )
    try:
        return list(_separated(content.decode(), path)) if is_separated else _array(content)
    except (ValueError, RecursionError, csv.Error) as error:
        kind = "CSV" if is_separated else "a JSON array"
        raise InvalidArgument(f"{path} is not {kind} in UTF-8: {error}: write one JSON object a line") from error


def rows_of(
    file: BinaryIO, path: str | os.PathLike[str], first_row: int = 0, end_row: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields (number from 1, row) of a slice for `parse_row`. Blank lines are counted and left out.

    Raises as `table` does.
    """
    rows = table(file, path)
    for number, row in islice(enumerate(file if rows is None else rows, 1), first_row, end_row):
        if not isinstance(row, bytes) or row.strip():
            yield number, row


def parse_row(row: Any) -> dict[str, Any]:
    """A line of JSONL, or a row of a table. Raises InvalidArgument unless it is a JSON object."""
    if isinstance(row, str | bytes):
        try:
            row = json.loads(row.removeprefix("\ufeff") if isinstance(row, str) else row)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"not JSON: {error}: write one JSON object a line") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"must be a JSON object, is {shown(row)}")
    return row


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key. `a.b` is b of the object a where there is no key `a.b`. None where there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def content_of(row: Mapping[str, Any], key: str) -> str | list[dict[str, Any]]:
    """The prompt: text, or one chat message or more. Raises InvalidArgument."""
    content = required(row, key)
    if isinstance(content, str) or (isinstance(content, list) and content and all(map(_is_message, content))):
        return content
    raise InvalidArgument(
        f"{key!r} must be text or an array of chat messages, each an object with a role, is {shown(content)}"
    )


def set_content(prompt: sample_pb2.Prompt | rollout_pb2.AgentTask, content: str | Sequence[Mapping[str, Any]]) -> None:
    """Gives a prompt, or a task of an agent host, what `content_of` has read."""
    if isinstance(content, str):
        prompt.text = content
    else:
        prompt.messages.CopyFrom(sample_pb2.ChatMessages(messages=map(chat_message, content)))


def typed_value(row: Mapping[str, Any], key: str | None, kind: type) -> Any:
    """None without the key, or where the row has no value of it. Raises InvalidArgument for one of another type."""
    value = value_at(row, key) if key else None
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{key!r} must be {_KINDS[kind]}, is {shown(value)}")
    return value


def required(row: Mapping[str, Any], key: str) -> Any:
    value = value_at(row, key)
    if value is None:
        head, _, rest = key.partition(".")
        inner = f", and {head!r} is {shown(row[head])}" if rest and head in row else ""
        raise InvalidArgument(f"lacks {key!r}, has {shown(sorted(row))}{inner}")
    return value


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


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _array(content: bytes) -> list[Any]:
    rows: list[Any] = json.loads(content)
    return rows


def _separated(text: str, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Cells are text. One with a JSON object or an array of objects is that: metadata, tools and messages."""
    header, _, _ = text.partition("\n")
    is_tabbed = os.fspath(path).lower().endswith(".tsv")
    delimiter = "\t" if is_tabbed else ";" if ";" in header and "," not in header else ","
    csv.field_size_limit(MAX_PROMPT_LINE_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    for row in reader:
        if None in row:
            raise ValueError(f"the row that ends in line {reader.line_num} has more cells than the header has names")
        yield {name: _cell(text) for name, text in row.items() if text}


def _cell(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_objects = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    return value if isinstance(value, dict) or is_objects else text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)
