"""A file of prompts to evaluate on: JSONL, a JSON array or CSV.

The operator named or allowed it. It is a regular file of bounded size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ConfigError, InvalidArgument
from headrace.images import with_images
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.production import EvalSection
from headrace.job.schema.section import PromptPath
from headrace.limits import MAX_EVAL_FILE_BYTES, MAX_EVAL_PROMPTS, MAX_PROMPT_LINE_BYTES, shown, to_json
from headrace.prompts import content_of, label_mark, label_text, ordered_json, parse_row, table, value_at
from headrace.trajectory import check_text

_FIELD = "datasets.path"


@dataclass(frozen=True, slots=True)
class EvalKeys:
    """The keys of a line that are read; None for one that is not."""

    prompt: str
    label: str | None
    metadata: str | None
    tools: str | None = None
    rm_type: str | None = None
    """No key: the scorer of rows whose metadata names none."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """No keys: what is laid over each row's metadata."""
    images: str | None = None


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One prompt; `where` is file:line."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any]
    tools: list[Any] | None = None
    hook_fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalFiles:
    """The files that a client may name: `files` themselves, and everything under the `root`."""

    files: Sequence[Path]
    root: Path | None

    @classmethod
    def of(cls, section: EvalSection, prompt_root: Path | None) -> EvalFiles:
        """Allows the files of a job's evaluations, and everything under its prompt_root."""
        return cls([each.prompts.path for each in eval_sets(section)], prompt_root)

    def read(self, path: str, keys: EvalKeys, max_prompts: int | None) -> list[EvalRow]:
        """Returns all rows of the file, or of its slice `path@[a:b]`, checked.

        Blocks; raises InvalidArgument with file and line for a bad row.
        """
        try:
            part = PromptPath.parse(path, _FIELD)
        except ConfigError as error:
            raise InvalidArgument(error.message, field=_FIELD) from error
        part = replace(part, path=self._allowed(str(part.path)))
        with _opened(part.path) as file:
            rows = [_row(where, line, keys) for where, line in _lines(part, file, max_prompts)]
        if not rows:
            raise InvalidArgument(f"{part.absolute()} has no prompts", field=_FIELD)
        return rows

    def _allowed(self, path: str) -> Path:
        """Follows links, so that none leads out of the root."""
        try:
            real = ((self.root or Path()) / path).resolve()
            if any(real == file.resolve() for file in self.files):
                return real
            if self.root is not None and real.is_relative_to(self.root.resolve()):
                return real
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidArgument(f"path {shown(path)} cannot be read: {error}", field=_FIELD) from error
        under = f"or lie under --prompt-root {self.root}" if self.root else "as there is no --prompt-root"
        raise InvalidArgument(f"path {shown(path)} must be one of the job's eval_prompt_data, {under}", field=_FIELD)


def _opened(path: Path) -> BinaryIO:
    """Opens a regular file; it waits for no FIFO and reads no device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidArgument(
            f"there is no file {path} to be read on the rollout service's machine: {error.strerror}", field=_FIELD
        ) from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_EVAL_FILE_BYTES:
        os.close(descriptor)
        raise InvalidArgument(
            f"{path} must be a regular file of at most {MAX_EVAL_FILE_BYTES} bytes, has {facts.st_size}", field=_FIELD
        )
    return os.fdopen(descriptor, "rb")


def _lines(part: PromptPath, file: BinaryIO, max_prompts: int | None) -> Iterator[tuple[str, Any]]:
    """Yields (file:line, row) of each row used."""
    path, used = part.path, 0
    rows = table(file, path)
    lines = iter(lambda: file.readline(MAX_PROMPT_LINE_BYTES + 1), b"") if rows is None else rows
    for number, line in enumerate(lines, 1):
        if part.end_row is not None and number > part.end_row:
            return
        if isinstance(line, bytes) and len(line) > MAX_PROMPT_LINE_BYTES:
            raise InvalidArgument(f"{path}:{number}: longer than {MAX_PROMPT_LINE_BYTES} bytes", field=_FIELD)
        if number <= part.first_row or (isinstance(line, bytes) and not line.strip()):
            continue
        if max_prompts is not None and used >= max_prompts:
            return
        used += 1
        if used > MAX_EVAL_PROMPTS:
            raise InvalidArgument(
                f"{path} has more than {MAX_EVAL_PROMPTS} prompts: pass max_prompts", field="datasets.max_prompts"
            )
        yield f"{path}:{number}", line


def _row(where: str, line: Any, keys: EvalKeys) -> EvalRow:
    try:
        row = parse_row(line)
        prompt = content_of(row, keys.prompt)
        if keys.images:
            prompt = with_images(prompt, row, keys.images, Path(where.rpartition(":")[0]).parent)
        given = value_at(row, keys.label) if keys.label else None
        label = label_text(given)
        metadata = value_at(row, keys.metadata) if keys.metadata else None
        metadata = metadata if isinstance(metadata, dict) else {}
        if keys.rm_type:
            metadata = {"rm_type": keys.rm_type, **metadata}
        metadata = {**metadata, **keys.overrides}
        found = EvalRow(where, prompt, label, metadata, _tools(row, keys.tools), label_mark(given))
        check_text("label", found.label or "")
        to_json(found.metadata)
        ordered_json(prompt)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error.message}", field=_FIELD) from error
    return found


def _tools(row: Mapping[str, Any], key: str | None) -> list[Any] | None:
    tools = value_at(row, key) if key else None
    if tools is not None and not isinstance(tools, list):
        raise InvalidArgument(f"{key!r} must be an array of tool definitions, is {shown(tools)}")
    ordered_json(tools)
    return tools
