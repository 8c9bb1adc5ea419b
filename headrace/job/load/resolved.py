"""Reads the resolved job that a launcher wrote for a run's services."""

from __future__ import annotations

from pathlib import Path

from headrace.job.schema.job import Job


def read_job(path: Path) -> Job:
    """Raises OSError, and pydantic's ValidationError for a file that no launcher of this version wrote."""
    return Job.model_validate_json(path.read_bytes())
