"""Readers of a prompt source. A cursor is all that a reader needs to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import InvalidArgument
from headrace.wire.limits import MAX_FILE_ROWS
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.source import Cursor


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """A prompt, and the cursor behind it."""

    prompt: Prompt
    cursor: Cursor
    samples: tuple[bytes, ...] = ()
    """Serialized, where the group is finished already."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Some prompts, and where to go on: behind the last one, or at the end of the source."""

    entries: Sequence[PromptEntry]
    cursor: Cursor


class PromptReader(Protocol):
    """`digest` says which contents a cursor belongs to; `bad_lines` were found when it was opened."""

    digest: str
    bad_lines: int

    async def read(self, cursor: Cursor, count: int) -> Reading:
        """The next `count` prompts; fewer only where the source ends."""

    def is_end(self, cursor: Cursor) -> bool:
        """True when no prompt follows."""

    async def close(self) -> None:
        """Ends it: no other method may be called afterwards."""


def unreadable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(
        f"prompt file {path}: {error.strerror or error}: it must be readable on the buffer's machine",
        field="config.files.path",
    )


def check_num_rows(path: Path, count: int) -> None:
    """Raises InvalidArgument for more rows than are kept in memory."""
    if count > MAX_FILE_ROWS:
        raise InvalidArgument(
            f"prompt file {path} has more than the {MAX_FILE_ROWS} rows that are kept in memory: set streaming",
            field="config.files.path",
        )


def without_prompts(path: Path) -> InvalidArgument:
    return InvalidArgument(f"prompt file {path} has no prompts", field="config.files.path")
