"""A job as TOML, to be read by people and by `headrace train`."""

from __future__ import annotations

import json
from typing import Any

from headrace.config.job import Job


def to_toml(job: Job) -> str:
    """Every leaf that has a value, by section; what is absent is left out. Reading it back gives the same job."""
    tree = job.model_dump(mode="json", exclude_none=True)
    return "\n".join(_table(section, table) for section, table in tree.items() if table)


def _table(section: str, table: dict[str, Any]) -> str:
    lines = [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join([f"[{section}]", *lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_value(each)}' for key, each in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)  # TOML has no surrogate pairs
