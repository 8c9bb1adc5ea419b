"""Finds the scorers that the rows of the job's evaluation files name."""

from __future__ import annotations

from itertools import islice

from headrace.errors import InvalidArgument
from headrace.job.schema.parts.prompt_path import PromptPath
from headrace.preflight.report import Scorers, count_scorer, scorer_name
from headrace.prompts.row import parse_row
from headrace.wire.limits import MAX_EVAL_FILE_BYTES


def scorers_of(prompts: PromptPath, metadata_key: str | None) -> dict[str, Scorers]:
    """Counts the scorers by rm_type ("" where a row names none). Bad rows are left to the rollout service's check."""
    path, found = prompts.path, dict[str, Scorers]()
    if not path.is_file() or path.stat().st_size > MAX_EVAL_FILE_BYTES:
        return found
    with path.open("rb") as lines:
        for number, line in islice(enumerate(lines, 1), prompts.first_row, prompts.end_row):
            if line.strip():
                count_scorer(found, _named(line, metadata_key), f"{path.name}, line {number}")
    return found


def _named(line: bytes, metadata_key: str | None) -> str:
    try:
        row = parse_row(line)
    except InvalidArgument:
        return ""
    metadata = row.get(metadata_key) if metadata_key else None
    return scorer_name(metadata) if isinstance(metadata, dict) else ""
