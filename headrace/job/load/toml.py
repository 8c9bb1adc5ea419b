"""Writes a job as TOML, for people and for `headrace train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from headrace.job.schema.job import Job


def to_toml(job: Job) -> str:
    """Every option that has a value, by section. Reading it back gives the same job."""
    tree = job.model_dump(exclude_none=True)
    return tomli_w.dumps({section: _plain(table) for section, table in tree.items() if table})


def _plain(value: Any) -> Any:
    """Converts paths to text, because TOML has no type for them."""
    match value:
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case Path():
            return str(value)
    return value
