"""Finds the scorers that the rows of the job's evaluation files name."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidArgument
from headrace.job.schema.parts.prompt_path import PromptPath
from headrace.preflight.report import Scorers, count_scorer, scorer_name
from headrace.prompts.row import parse_row, rows_of, value_at
from headrace.wire.limits import MAX_EVAL_FILE_BYTES


def scorers_of(prompts: PromptPath, metadata_key: str | None) -> dict[str, Scorers]:
    """Counts the scorers by rm_type ("" where a row names none). Bad rows are left to the rollout service's check."""
    path, found = prompts.path, dict[str, Scorers]()
    if not path.is_file() or path.stat().st_size > MAX_EVAL_FILE_BYTES:
        return found
    with path.open("rb") as file:
        for number, row in rows_of(file, path):
            if prompts.end_row is not None and number > prompts.end_row:
                break
            if number > prompts.first_row:
                count_scorer(found, _named(row, metadata_key), f"{path.name}, line {number}")
    return found


def _named(line: Any, metadata_key: str | None) -> str:
    try:
        row = parse_row(line)
    except InvalidArgument:
        return ""
    metadata = value_at(row, metadata_key) if metadata_key else None
    return scorer_name(metadata) if isinstance(metadata, dict) else ""
