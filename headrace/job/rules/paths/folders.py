"""Checks that the folders which a run will write can be created."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job


def check_folders(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a folder that cannot be made or written, with the reason that the system gives."""
    checkpoint = job.checkpoint
    folders = {"run_dir": job.run.folder}
    if "trainer" in scope.services:
        folders |= {
            name: folder
            for name, folder in (
                ("save", checkpoint.save),
                ("save_hf", checkpoint.save_hf),
                ("export_root", checkpoint.export_root),
                ("update_weight_disk_path", job.publish.update_weight_disk_path),
            )
            if folder is not None
        }
    for name, folder in folders.items():
        try:
            _try(folder)
        except OSError as error:
            flag = f"--{name.replace('_', '-')}"
            refusal = ConfigError(
                f"{name} {folder} cannot be written: {error.strerror}: choose another folder with {flag}", field=name
            )
            scope.missing(refusal)


def _try(folder: Path) -> None:
    """Creates and removes a folder beside the first ancestor that is missing, to see whether the system allows it."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    os.rmdir(tempfile.mkdtemp(prefix=".headrace-", dir=there))
