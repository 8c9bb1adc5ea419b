"""The sources of a stream's prompts besides SubmitPrompts, and a cursor for each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class FileSource:
    """Rows [first_row, end_row) of a JSONL or Parquet file. Raises InvalidArgument when a value is out of range."""

    path: str
    input_key: str
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    priority_key: str | None = None
    image_key: str | None = None
    shuffle: bool = False
    seed: int = 0
    num_epochs: int | None = None
    skip_bad_lines: bool = False
    first_row: int = 0
    end_row: int | None = None
    weight: float = 1.0
    """Its share of the stream's prompts, relative to the weights of the other files."""
    streaming: bool = False
    """Only the blocks being read are in memory."""
    num_workers: int = 1
    """Processes that parse blocks of a streamed file."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidArgument(
                f"the weight of {self.path} is {self.weight}, must be above 0", field="config.files.weight"
            )
        if self.end_row is not None and self.end_row <= self.first_row:
            raise InvalidArgument(
                f"{self.path}@[{self.first_row}:{self.end_row}] has no rows: the end must be above the start",
                field="config.files.end_row",
            )


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position in one file: every prompt before (epoch, row) is a group already.

    In a streamed file `row` counts from the start of the block at byte (or row group) `offset`, which has `line` rows
    before it.
    """

    epoch: int = 0
    row: int = 0
    prompts_read: int = 0
    offset: int = 0
    line: int = 0
    bad_lines: int = 0
    """Bad lines skipped so far in a streamed file."""


def source_names(files: Sequence[FileSource]) -> list[str]:
    """Names each source in prompt ids and statistics by its file's name, numbered where two files share it."""
    names = [Path(file.path).name for file in files]
    times = Counter(names)
    return [name if times[name] == 1 else f"{i}.{name}" for i, name in enumerate(names)]
