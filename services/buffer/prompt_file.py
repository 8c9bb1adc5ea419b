"""A JSONL file of prompts: every row once in every epoch, in the file's order or in one drawn from (seed, epoch).

Opening reads the whole file once: bad lines are found before the first step, not in the middle of a run, and afterwards
only the offset of each row is in memory. A row is known by its line number; a prompt by file name, line and epoch.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from services.buffer.group import Prompt
from services.buffer.stream import Cursor, FileSource


@dataclass(frozen=True, slots=True)
class Reading:
    """Some prompts, and where to go on."""

    prompts: list[Prompt]
    cursor: Cursor
    exhausted: bool


class PromptFile:
    """Raises InvalidArgument naming path and line for a bad line, unless the source skips and counts them."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._path = Path(source.path)
        self._offsets = array("Q")
        self._lines = array("Q")
        self._epoch_order: tuple[int, Sequence[int]] | None = None
        self.bad_lines = 0
        self.digest = self._index()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts of the walk; fewer where the last epoch ends."""
        prompts: list[Prompt] = []
        with self._path.open("rb") as file:
            while len(prompts) < count and not self._is_end(cursor):
                row = self._order(cursor.epoch)[cursor.row]
                file.seek(self._offsets[row])
                prompts.append(self._parse(file.readline(), self._lines[row], cursor.epoch))
                cursor = self._next(cursor)
        return Reading(prompts, cursor, self._is_end(cursor))

    def _next(self, cursor: Cursor) -> Cursor:
        moved = replace(cursor, row=cursor.row + 1, prompts_read=cursor.prompts_read + 1)
        return moved if moved.row < len(self) else replace(moved, epoch=cursor.epoch + 1, row=0)

    def _is_end(self, cursor: Cursor) -> bool:
        return self._source.num_epochs is not None and cursor.epoch >= self._source.num_epochs

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._source.shuffle:
            return range(len(self))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            # Sorted by random() and not shuffle()d: Python promises equal numbers in every version for the former only.
            generator = random.Random(f"{self._source.seed}/{epoch}")
            keys = [generator.random() for _ in range(len(self))]
            self._epoch_order = (epoch, sorted(range(len(self)), key=keys.__getitem__))
        return self._epoch_order[1]

    def _index(self) -> str:
        digest = hashlib.sha256()
        offset = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip() and self._is_good(line, number):
                        self._offsets.append(offset)
                        self._lines.append(number)
                    offset += len(line)
        except OSError as error:
            raise InvalidArgument(
                f"prompt file {self._path}: {error.strerror}: it must be readable on the buffer's machine",
                field="config.file.path",
            ) from error
        if not self._offsets:
            raise InvalidArgument(f"prompt file {self._path} has no prompts", field="config.file.path")
        return digest.hexdigest()

    def _is_good(self, line: bytes, number: int) -> bool:
        try:
            self._parse(line, number, epoch=0)
        except InvalidArgument:
            if not self._source.skip_bad_lines:
                raise
            self.bad_lines += 1
            return False
        return True

    def _parse(self, line: bytes, number: int, epoch: int) -> Prompt:
        try:
            prompt = _to_prompt(self._source, line)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                f"{self._path}, line {number}: {error}: correct it, or set skip_bad_lines",
                field="config.file.path",
                reason="BAD_LINE",
                path=str(self._path),
                line=str(number),
            ) from error
        prompt.prompt_id = f"{self._path.name}:{number}@{epoch}"
        return Prompt(prompt.prompt_id, prompt.SerializeToString(deterministic=True), prompt.priority)


def _to_prompt(source: FileSource, line: bytes) -> sample_pb2.Prompt:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"must be a JSON object, is {_shown(row)}")
    prompt = sample_pb2.Prompt()
    content = _value(row, source.input_key)
    if isinstance(content, str):
        prompt.text = content
    elif isinstance(content, list) and content:
        prompt.messages.messages.extend(_to_message(turn) for turn in content)
    else:
        raise TypeError(f"{source.input_key!r} must be text or an array of chat messages, is {_shown(content)}")
    if source.label_key:
        label = _value(row, source.label_key)
        prompt.label = label if isinstance(label, str) else _dump(label)
    if source.metadata_key and row.get(source.metadata_key) is not None:
        prompt.metadata_json = _dump(_typed(row, source.metadata_key, dict))
    if source.tool_key and row.get(source.tool_key) is not None:
        prompt.tools_json = _dump(_typed(row, source.tool_key, list))
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
        raise TypeError(f"{key!r} must be {'an object' if kind is dict else 'an array'}, is {_shown(row[key])}")
    return row[key]


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]
