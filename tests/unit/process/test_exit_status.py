"""A service ends with the code that `headrace.process.exit_status` has for what ended it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.errors import (
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    DiskFull,
    HeadraceError,
    NothingToLearn,
    Unavailable,
)
from headrace.job.schema.job import Job
from headrace.process.exit_status import ExitStatus
from headrace.run_folder import RunFolder
from services.buffer import __main__ as buffer
from services.reward import __main__ as reward
from services.rollout import __main__ as rollout
from services.trainer import __main__ as trainer

SERVICES = {buffer: ("serve", "--data-dir"), reward: ("_serve", None), rollout: ("_serve", "--log-dir")}
SERVICES[trainer] = ("run_rank", "--run-dir")


def ended_by(
    service: ModuleType, error: Exception, folder: Path, patch: pytest.MonkeyPatch, text: str | None = None
) -> int:
    async def serve(*_: object) -> None:
        raise error

    work, folder_flag = SERVICES[service]
    patch.setattr(service, work, serve)
    config = folder / "job.json"
    job = {"model": {"hf_checkpoint": "m"}, "buffer": {"buffer_store": "memory"}}
    config.write_text(Job.model_validate(job).model_dump_json() if text is None else text)
    words = ["--config", str(config), "--address", "127.0.0.1:0", *([folder_flag, str(folder)] if folder_flag else [])]
    patch.setattr(sys, "argv", [service.__name__, *words])
    code: int = service.main()
    return code


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.__name__.split(".")[1])
def test_every_service_has_one_code_for_what_a_restart_cannot_mend_and_one_for_what_it_may(
    service: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended_by(service, ConfigError("no such hook"), tmp_path, monkeypatch) == 2
    assert ended_by(service, DataLoss("a damaged file"), tmp_path, monkeypatch) == 1


@pytest.mark.parametrize(
    ("service", "error", "code"),
    [
        (buffer, Unavailable("the database is away"), 75),
        (buffer, DiskFull("its own disk"), 1),
        (trainer, Unavailable("the buffer gave no answer"), 75),
        (trainer, DeadlineExceeded("the buffer gave no answer"), 75),
        (trainer, DiskFull("the buffer's disk is full"), 75),
        (trainer, NothingToLearn("all samples failed"), 3),
        (rollout, Unavailable("its own router ended"), 1),
        (reward, Unavailable("its port is taken"), 1),
    ],
    ids=lambda value: value.__name__.split(".")[1] if isinstance(value, ModuleType) else None,
)
def test_only_who_ends_for_want_of_another_one_says_so(
    service: ModuleType, error: HeadraceError, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended_by(service, error, tmp_path, monkeypatch) == code


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.__name__.split(".")[1])
@pytest.mark.parametrize("error", [ConfigError("no such hook"), OSError(28, "No space left on device")], ids=type)
def test_every_service_says_in_one_line_why_it_ended(
    service: ModuleType,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended_by(service, error, tmp_path, monkeypatch)
    name = service.__name__.split(".")[1]
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith(name)] == [f"{name}: {error}"]


def test_a_mistake_in_the_job_is_known_where_srun_keeps_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_by(trainer, DataLoss("never raised"), tmp_path, monkeypatch, text="{}")
    ending = ExitStatus.read(RunFolder(tmp_path).exit_status)
    assert ending is not None
    assert ending.exit_code == 2
