"""Parses `path@[a:b]`: lines (in parquet: rows) a to b of a prompt file, counted from 0, b not included."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<first>[0-9]{0,18}):(?P<end>[0-9]{0,18})\]")


@dataclass(frozen=True, slots=True)
class PromptPath:
    """A file and the range of its rows; an `end_row` of None means the last."""

    path: Path
    first_row: int = 0
    end_row: int | None = None

    @classmethod
    def parse(cls, text: str, option: str = "prompt_data") -> PromptPath:
        """Raises ConfigError, which names the option, for a slice that does not parse, or that is empty."""
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise ConfigError(
                    f"{option} {text}: write a slice as path@[a:b], with lines a to b counted from 0; "
                    "both are optional, and neither may be negative",
                    field=option,
                )
            return cls(Path(text))
        first, end = int(match["first"] or 0), int(match["end"]) if match["end"] else None
        if end is not None and end <= first:
            raise ConfigError(f"{option} {text}: the slice holds no lines", field=option)
        return cls(Path(match["path"]), first, end)

    def absolute(self) -> str:
        """The same slice with an absolute path."""
        path = str(self.path.expanduser().absolute())
        if not self.first_row and self.end_row is None:
            return path
        return f"{path}@[{self.first_row or ''}:{'' if self.end_row is None else self.end_row}]"
