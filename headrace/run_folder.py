"""The folder of a run: job.json and job.toml, services.json, logs/, ledger/, and the trainer's files and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace import __version__
from headrace.disk import atomic_write
from headrace.errors import DataLoss, NotFound
from headrace.job.schema.job import Job, read_job, to_toml
from headrace.job.schema.run import PublishSection
from headrace.limits import object_of_line, whole_number
from headrace.process.linux import identity_of
from headrace.process.scratch import memory_folder

BUFFER = "buffer"
ROLLOUT = "rollout"
_OF_SEVERAL = (BUFFER, ROLLOUT)
_MOST_PROCESSES = 9_999


def process_name(service: str, number: int) -> str:
    """The name of one of several processes of a service, in services.json, in logs/ and to a person."""
    return f"{service}-{number}"


def number_of(process: str) -> int | None:
    """The number of the process among those of its service; None for one that is the whole service."""
    service, _, number = process.partition("-")
    return whole_number(number, _MOST_PROCESSES) if service in _OF_SEVERAL else None


def service_of(process: str) -> str:
    """The service that a process is, or is one of several of."""
    return process if number_of(process) is None else process.partition("-")[0]


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A service's addresses; `pid` is absent for one that this run did not start.

    A service of several processes has an entry with all addresses, separated by commas, and one for each process.
    """

    address: str
    metrics_address: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names the files of one run."""

    path: Path

    @classmethod
    def of(cls, job: Job) -> RunFolder:
        """The folder that the job names, whether or not it is there."""
        return cls(job.run.folder)

    @property
    def job_file(self) -> Path:
        """The resolved job of the run, as its services have accepted it."""
        return self.path / "job.json"

    def config_of(self, service: str) -> Path:
        """The resolved job with which the service was started last: the run's own once it was accepted."""
        return self.path / f".{service}-job.json"

    @property
    def _version_file(self) -> Path:
        """The release that started the run last, for a refusal to name it."""
        return self.path / "version"

    @property
    def logs(self) -> Path:
        """Holds one file for each service, and the engines' files."""
        return self.path / "logs"

    @property
    def ledger(self) -> Path:
        """Holds the buffer's data, or a folder for each of its shards."""
        return self.path / "ledger"

    def logs_of(self, rollout_service: int | None) -> Path:
        """Holds the logs of the engines and the router of one of several rollout services, or of the only one."""
        return self.logs if rollout_service is None else self.logs / process_name(ROLLOUT, rollout_service)

    def ledger_of(self, shard: int | None) -> Path:
        """Holds the data of one of several shards, or of the only buffer."""
        return self.ledger if shard is None else self.ledger / f"shard-{shard}"

    @property
    def metrics(self) -> Path:
        """Has one line of metrics for each step."""
        return self.path / "metrics.jsonl"

    @property
    def training_record(self) -> Path:
        """Records which samples the trainer fed to each step."""
        return self.path / "trained.jsonl"

    @property
    def samples(self) -> Path:
        """Holds the generated samples, step by step."""
        return self.path / "samples"

    @property
    def traces(self) -> Path:
        """Holds the spans of each process (`headrace.rpc.tracing`)."""
        return self.path / "traces"

    @property
    def profile(self) -> Path:
        """Holds what PyTorch's profiler saw of single steps, a file for each rank."""
        return self.path / "profile"

    @property
    def shadow(self) -> Path:
        """What a shadow scorer said beside the one that paid (`headrace.shadow_log`)."""
        return self.path / "shadow.jsonl"

    @property
    def scorer_state(self) -> Path:
        """Says which scorer pays, and which one is tried."""
        return self.path / "reward.json"

    def weights_of(self, publish: PublishSection) -> Path:
        """Holds the policy versions that travel to the engines through files, on a disk or in shared memory."""
        if publish.update_weight_transport == "ipc":
            return memory_folder(self.path)
        return (publish.update_weight_disk_path or self.path / "weights").absolute()

    @property
    def written_weights(self) -> Path:
        """Notes the policy versions that this run wrote into a folder that other runs may use, too."""
        return self.path / "written-weights.jsonl"

    @property
    def exit_status(self) -> Path:
        """Has the reason if the trainer ended with an error (`headrace.process.exit_status`)."""
        return self.path / ".trainer-ended.json"

    def restart_request(self, process: str) -> Path:
        """Is there while somebody wants the process to be started again (`headrace restart`)."""
        return self.path / f".restart-{process}"

    @property
    def services_file(self) -> Path:
        """Has addresses and process ids."""
        return self.path / "services.json"

    def prepare(self, job: Job, services: Iterable[str]) -> None:
        """Makes the folders, and writes the job for these services alone: the run's own stays as it is."""
        for folder in (self.path, self.logs, self.ledger):
            folder.mkdir(parents=True, exist_ok=True)
        for service in services:
            _write_whole(self.config_of(service), job.model_dump_json(indent=2) + "\n")

    def create(self, job: Job) -> None:
        """Makes the folders and writes the resolved job, also as TOML for people."""
        self.prepare(job, ())
        _write_whole(self.job_file, job.model_dump_json(indent=2) + "\n")
        _write_whole(self.path / "job.toml", to_toml(job))
        _write_whole(self._version_file, __version__ + "\n")

    def job(self) -> Job:
        """The resolved job. Raises NotFound, and DataLoss for a file that no launcher of this version wrote."""
        if not self.job_file.is_file():
            raise NotFound(f"{self.path} has no job.json: it is not a run's folder")
        try:
            return read_job(self.job_file)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DataLoss(
                f"{self.job_file} is not a job of this version, headrace {__version__}: {where[:160]} {first['msg']}"
                f"{self._written_by()}"
            ) from error

    def _written_by(self) -> str:
        """Headrace 0.1.0 did not write its version."""
        try:
            version = self._version_file.read_text()[:80].strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return "" if version == __version__ else f"; headrace {version} wrote it: use that one for this run"

    @property
    def _processes_file(self) -> Path:
        """Has what tells the processes of services.json from later ones: releases before this file do not write it."""
        return self.path / ".processes.json"

    def write_services(self, entries: Mapping[str, ServiceEntry]) -> None:
        """Replaces services.json at once, so that readers never see half of it."""
        tree = {name: asdict(entry) for name, entry in entries.items()}
        _write_whole(self.services_file, json.dumps(tree, indent=2) + "\n")
        known = {str(entry.pid): identity_of(entry.pid) for entry in entries.values() if entry.pid is not None}
        _write_whole(self._processes_file, json.dumps(known) + "\n")

    def services(self) -> dict[str, ServiceEntry]:
        """The entries that were written last. Raises NotFound, and DataLoss for a damaged file."""
        if not self.services_file.is_file():
            raise NotFound(f"{self.path} has no services.json: it is not a run's folder, or the run never started")
        try:
            tree = json.loads(self.services_file.read_text())
            return {name: ServiceEntry(**entry) for name, entry in tree.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataLoss(f"{self.services_file} is damaged ({error}): start the run again to rewrite it") from error

    def running_services(self) -> dict[str, ServiceEntry]:
        """Services that a launcher of this folder started and whose process exists; none where the file is damaged."""
        services, known = self.services_before().items(), self._processes()
        return {name: entry for name, entry in services if entry.pid is not None and _runs(entry.pid, known)}

    def _processes(self) -> Mapping[str, object]:
        """Maps process numbers to identities; empty where nobody wrote them down."""
        try:
            found = json.loads(self._processes_file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def services_before(self) -> dict[str, ServiceEntry]:
        """The entries for a start, which writes the file again: none where it is absent or damaged."""
        try:
            return self.services()
        except (NotFound, DataLoss):
            return {}

    def running_addresses(self) -> dict[str, str]:
        """Maps services that run to their addresses; those of all its processes, also of one that restarts."""
        running = {service_of(name) for name in self.running_services()}
        services = self.services() if running else {}
        return {name: entry.address for name, entry in services.items() if name in running}


def living_runs(run_dir: Path) -> list[RunFolder]:
    """Runs with a service that a launcher started here and whose process exists, ordered by name."""
    runs = [RunFolder(file.parent) for file in sorted(run_dir.glob("*/services.json"))]
    return [run for run in runs if run.running_services()]


def newest_run(run_dir: Path) -> RunFolder:
    """The run that was started last in `run_dir`. Raises NotFound when there is none."""
    found = sorted(run_dir.glob("*/services.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise NotFound(f"no run in {run_dir.absolute()}: name the run's folder, or start one with headrace train")
    return RunFolder(found[-1].parent)


def _runs(pid: int, known: Mapping[str, object]) -> bool:
    """False for another process that has its number: the machine, or the container, was started again meanwhile."""
    now = identity_of(pid)
    return now is not None and known.get(str(pid), now) == now


def _write_whole(file: Path, text: str) -> None:
    with atomic_write(file) as draft:
        draft.write_text(text)


_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
"""Every line begins so: a reader that looks for some steps need not decode the others."""
_TAIL_BYTES = 65_536
_EVALUATION = "eval"
"""What the names of an evaluation's metrics begin with."""


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step or evaluation, and when they came (seconds since 1970)."""

    step: int
    time: float
    metrics: Mapping[str, float]
    warnings: Sequence[str] = ()
    """Sentences for a person."""
    marks: Sequence[str] = ()
    """What changed before the step, for the pictures: a restart, options, the scorer."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> MetricsRow:
        """Takes the row out of a line's fields."""
        warnings, marks = fields.pop("warnings", ()), fields.pop("marks", ())
        return cls(fields.pop("step"), fields.pop("time"), warnings=warnings, marks=marks, metrics=fields)

    def fields(self) -> dict[str, Any]:
        """The line's fields, the step first."""
        texts = {"warnings": self.warnings, "marks": self.marks}
        return {"step": self.step, "time": self.time, **{k: v for k, v in texts.items() if v}, **self.metrics}


def step_of(line: bytes) -> int | None:
    """Returns the step of a line, which a kill may have torn; None for what is no line of metrics."""
    found = _STEP.match(line)
    return int(found[1]) if found else None


def row_of(line: bytes) -> MetricsRow | None:
    """Returns a line's row; None for one that a kill tore."""
    fields = object_of_line(line)
    return None if fields is None else MetricsRow.of(fields)


def is_evaluation(metrics: Mapping[str, float]) -> bool:
    """True for the metrics of an evaluation, False for a step's."""
    return all(name.startswith(_EVALUATION) for name in metrics)


def fields_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the fields of each whole line; none where there is no file: it may be on the trainer's machine."""
    if file.is_file():
        with file.open("rb") as lines:
            yield from filter(None, map(object_of_line, lines))


def last_fields_in(file: Path) -> list[dict[str, Any]]:
    """The fields of the last lines, as `fields_in`: of a file of any size 64 KiB are read."""
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return list(filter(None, map(object_of_line, lines)))
