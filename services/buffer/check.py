"""The buffer's part of a job, before it starts: its stream, its hooks, and every prompt that can be read in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import HeadraceError, InvalidArgument
from headrace.hooks import hook_args
from headrace.hooks.buffer_filter import load_buffer_filter
from headrace.hooks.data_source.worker import Given, try_data_source
from headrace.limits import from_json
from headrace.preflight import (
    CheckOptions,
    PromptRow,
    Prompts,
    ReadPrompts,
    Report,
    count_scorer,
    hook_pool,
    scorer_name,
    serve_check,
    tell_progress,
)
from headrace.prompts import rows_of
from services.buffer.build import HOOK_SECONDS, of_shard, train_stream
from services.buffer.ledger.group import Prompt
from services.buffer.ledger.stream import FileSource, source_names
from services.buffer.prompts.data_source import prompt_of_sample
from services.buffer.prompts.files import RowReader

_GIVEN_ROWS = 512
"""Rows for the other services' checks; at least as many are read of each file."""
_MOST_GIVEN_ROWS = 20_000
"""The limit together with the first row of each rm_type."""
_AT_ONCE = 512
_PROGRESS_SECONDS = 2.0
_TRIED_PROMPTS = 4


async def check(options: CheckOptions, _: ReadPrompts) -> Report:
    """Parses prompts as the buffer will, until the time is over, and counts the rest."""
    report, job = Report(), options.job
    prompts = report.prompts
    clock = ReadingClock(options.read_seconds, tell_progress)
    try:
        is_one_of_several = job.buffer.buffer_shards > 1 and job.buffer.buffer_shard is None
        stream = train_stream(of_shard(job, 0) if is_one_of_several else job)  # shards have the same files
        for source, name in zip(stream.files, source_names(stream.files), strict=True):
            if Path(source.path).is_file():  # else the job's own rules have said so
                _File(RowReader(source, name), report, prompts, clock).read()
    except HeadraceError as error:
        report.refuse(error)
    await _hooks(options, report, prompts)
    if len(prompts.rm_types) > 1 or "" not in prompts.rm_types:
        most_first = sorted(prompts.rm_types.items(), key=lambda item: -item[1].count)
        if most_first:
            named = [f"{name or 'none'} {scorers.count:,}" for name, scorers in most_first]
            report.facts.append(("metadata.rm_type", ", ".join(named)))
    return report


class ReadingClock:
    """Limits the time that all files together may take, and reports progress meanwhile."""

    def __init__(
        self, seconds: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._tell = tell
        self._clock = clock
        self._end = clock() + seconds
        self._told = clock()

    @property
    def is_over(self) -> bool:
        """True when no more rows should be read."""
        return self._clock() >= self._end

    def passed(self, path: str, rows: int) -> None:
        """Reports, at most every two seconds, how many rows of the file were read."""
        now = self._clock()
        if now - self._told < _PROGRESS_SECONDS:
            return
        self._told = now
        done = "the rest is only counted" if self.is_over else f"for {self._seconds:g} s at most"
        self._tell(f"reading prompts, {done}: {rows:,} rows of {path}")


class _File:
    """Checks one file of prompts."""

    def __init__(self, reader: RowReader, report: Report, prompts: Prompts, clock: ReadingClock) -> None:
        self._clock = clock
        self._reader = reader
        self._source: FileSource = reader.source
        self._report = report
        self._prompts = prompts
        self._bad: list[str] = []
        self._parsed = 0

    def read(self) -> None:
        """Raises InvalidArgument, by file and line, for a row that cannot be used."""
        path, total = self._source.path, 0
        for number, line in self._rows():
            if line is not None:
                self._take(number, line)
            total += 1
            self._clock.passed(path, total)
        if not self._parsed and self._bad:
            raise InvalidArgument(f"{path}: none of its rows is a prompt; the first: {self._bad[0]}")
        if not total:
            raise InvalidArgument(f"{path} has no prompts")
        self._prompts.num_rows += total
        bad = f", {len(self._bad):,} bad ones skipped" if self._bad else ""
        self._report.facts.append(("prompts", f"{total:,} in {path}{bad}"))
        read = self._parsed + len(self._bad)
        if read < total:
            self._report.unchecked.append(
                f"{total - read:,} of {total:,} rows of {path}: the first {read:,} were read when the time was over"
            )

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Yields (row number from 1, the row); the row is None where it is only counted."""
        return self._of_parquet() if self._source.path.endswith(".parquet") else self._of_jsonl()

    def _of_jsonl(self) -> Iterator[tuple[int, Any]]:
        source = self._source
        with open(source.path, "rb") as file:
            for number, row in rows_of(file, source.path, source.first_row, source.end_row):
                yield number, row if self._goes_on() else None

    def _of_parquet(self) -> Iterator[tuple[int, Prompt | None]]:
        from services.buffer.prompts.parquet import ParquetRows  # pyarrow: only for those who have such files

        rows = ParquetRows(self._reader)
        numbers = list(rows.numbers())
        for start in range(0, len(numbers), _AT_ONCE):
            chunk = numbers[start : start + _AT_ONCE]
            indices = range(start, start + len(chunk))
            yield from zip(chunk, rows.prompts(indices, 0) if self._goes_on() else [None] * len(chunk), strict=True)

    def _goes_on(self) -> bool:
        """True when another row should be read. The first rows always are, because the other services check them."""
        return self._parsed + len(self._bad) < _GIVEN_ROWS or not self._clock.is_over

    def _take(self, number: int, row: Any) -> None:
        try:
            prompt = row if isinstance(row, Prompt) else self._reader.from_line(row, number, 0)
        except InvalidArgument as error:
            if not self._source.skip_bad_lines:
                raise
            self._bad.append(error.message)
            return
        self._parsed += 1
        _add(self._prompts, f"{os.path.basename(self._source.path)}, line {number}", prompt.body)


def _add(prompts: Prompts, where: str, body: bytes) -> None:
    is_first = count_scorer(prompts.rm_types, _rm_type(sample_pb2.Prompt.FromString(body).metadata_json), where)
    if len(prompts.rows) < (_MOST_GIVEN_ROWS if is_first else _GIVEN_ROWS):
        prompts.rows.append(PromptRow(where, body))


def _rm_type(metadata_json: str) -> str:
    if "rm_type" not in metadata_json:
        return ""
    return scorer_name(from_json(metadata_json))


async def _hooks(options: CheckOptions, report: Report, prompts: Prompts) -> None:
    job = options.job
    async with hook_pool(options, report) as pool:
        if job.buffer.buffer_filter_path:
            await pool.run(load_buffer_filter, job.buffer.buffer_filter_path, timeout_seconds=HOOK_SECONDS)
        if path := job.data.data_source_path:
            given: list[Given] = await pool.run(
                try_data_source, path, hook_args(job), _TRIED_PROMPTS, timeout_seconds=HOOK_SECONDS, name=f"hook {path}"
            )
            report.facts.append(("prompts", f"from {path}, which gave {len(given)} when asked for {_TRIED_PROMPTS}"))
            for number, each in enumerate(given, 1):
                if each.finished is None:
                    body = prompt_of_sample(path, each.prompt).SerializeToString(deterministic=True)
                    _add(prompts, f"{path}, prompt {number}", body)


if __name__ == "__main__":
    serve_check(check)
