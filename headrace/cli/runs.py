"""Which run a command is about, and where its services are."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import ValidationError

from headrace.config.job import Job
from headrace.errors import DataLoss, FailedPrecondition, NotFound
from headrace.launch.run_folder import RunFolder, newest_run

RUNS = Path("runs")


def add_run_argument(parser: argparse.ArgumentParser, name: str = "run") -> None:
    """`RUN` or `--run RUN`: a run's folder, its name, or nothing for the newest."""
    help_text = "a run's folder, or its name in runs/; the newest run if absent"
    if name.startswith("--"):
        parser.add_argument(name, help=help_text)
    else:
        parser.add_argument(name, nargs="?", help=help_text)


def find_run(text: str | None) -> RunFolder:
    """Raises NotFound with what there is."""
    if text is None:
        return newest_run(RUNS)
    for path in (Path(text), RUNS / text):
        if (path / "services.json").is_file():
            return RunFolder(path)
    there = sorted(file.parent.name for file in RUNS.glob("*/services.json"))
    raise NotFound(f"no run {text}; runs here: {', '.join(there) or 'none'}")


def address_in(folder: RunFolder, service: str, given: str | None = None) -> str:
    """`given`, else the service's address in the run. Raises FailedPrecondition for a run that has ended."""
    if given:
        return given
    services = folder.services()
    if service not in services:
        raise NotFound(f"{folder.path} has no {service} service: its services are {', '.join(services) or 'none'}")
    entry = services[service]
    if entry.pid is not None and not folder.running_services():
        raise FailedPrecondition(
            f"{folder.path} has ended, and its {service} service with it: run the command that started it again, "
            "or read metrics.jsonl there and `headrace audit`"
        )
    return entry.address


def job_of(folder: RunFolder) -> Job:
    """The resolved job of a run."""
    if not folder.job_file.is_file():
        raise NotFound(f"{folder.path} has no job.json: it is no run's folder")
    try:
        return Job.model_validate_json(folder.job_file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataLoss(f"{folder.job_file} is no job of this version: {where} {first['msg']}") from error
