"""A job as TOML, to be read by people and by `headrace train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from headrace.job.schema.job import Job


def to_toml(job: Job) -> str:
    """Every leaf that has a value, by section; what is absent is left out. Reading it back gives the same job."""
    tree = job.model_dump(exclude_none=True)
    return tomli_w.dumps({section: _plain(table) for section, table in tree.items() if table})


def _plain(value: Any) -> Any:
    """Paths as text: TOML has no word for them."""
    match value:
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case Path():
            return str(value)
    return value
