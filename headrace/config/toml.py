"""A job as TOML, to be read by people and by `headrace train`."""

from __future__ import annotations

import tomli_w

from headrace.config.job import Job


def to_toml(job: Job) -> str:
    """Every leaf that has a value, by section; what is absent is left out. Reading it back gives the same job."""
    tree = job.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps({section: table for section, table in tree.items() if table})
