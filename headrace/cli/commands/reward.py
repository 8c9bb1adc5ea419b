"""`headrace reward set`: another reward function for a live run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from headrace.cli.arg_types import Group, run_argument
from headrace.cli.commands.live import restarted
from headrace.cli.commands.reward_service import new, serve
from headrace.cli.runs import find_run
from headrace.disk import atomic_write
from headrace.errors import ConfigError, FailedPrecondition, HeadraceError
from headrace.hooks import hook_args
from headrace.hooks.trial.check import check_hook
from headrace.job.load.resolve import resolve
from headrace.job.schema.job import Job, read_job
from headrace.rpc.log import drop_logs

_REWARD = "reward"


@click.group(cls=Group)
def reward() -> None:
    """Changes how a live run scores."""


reward.add_command(serve)
reward.add_command(new)


@reward.command("set")
@click.argument("path")
@run_argument
def set_(path: str, run: str | None) -> int:
    """Scores with another function from now on: PATH is pkg.mod.fn or file.py:fn.

    The function is tried first, as `headrace check hook` does. Samples that wait are scored by the new one, and every
    sample names its scorer. A run that is started again has the function of its job: change --custom-rm-path there.
    """
    drop_logs()
    folder = find_run(run)
    if _REWARD not in folder.running_services():
        raise FailedPrecondition(
            f"no launcher of {folder.path} keeps a reward service alive here: end the one that runs, and start "
            f"`headrace up reward --custom-rm-path {path}` in its place"
        )
    config = folder.config_of(_REWARD)
    before = config.read_bytes()
    job = _with_reward(read_job(config), _absolute(path))
    _write(config, job.model_dump_json(indent=2).encode() + b"\n")
    try:
        asyncio.run(restarted(folder, _REWARD))
    except HeadraceError:
        _write(config, before)
        raise
    print(f"{folder.path} is scored by {path}")
    return 0


def _with_reward(job: Job, path: str) -> Job:
    """Raises ConfigError for a function that is no reward, or fails when it is tried."""
    report = check_hook(path, None, hook_args(resolve(job)))
    if report.failed:
        raise ConfigError("; ".join(report.failed))
    if report.kind not in ("reward", "group_reward"):
        raise ConfigError(f"{path} is a {report.kind} hook: name a function (args, sample) or (args, samples)")
    scorer = {"custom_rm_path": path, "rm_type": None, "group_rm": report.kind == "group_reward"}
    return job.model_copy(update={"reward": job.reward.model_copy(update=scorer)})


def _absolute(path: str) -> str:
    """A file's name from here, because the service may have been started in another folder."""
    file, colon, function = path.rpartition(":")
    return f"{Path(file).absolute()}{colon}{function}" if colon and Path(file).is_file() else path


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path) as draft:
        draft.write_bytes(content)
