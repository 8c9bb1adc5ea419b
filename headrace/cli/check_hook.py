"""`headrace check hook PATH`: loads a hook and tries it on samples, with a job's own arguments."""

from __future__ import annotations

import os
from pathlib import Path

import click

from headrace.cli.arg_types import PATH, json_option, print_json
from headrace.errors import ConfigError
from headrace.hooks import HookArgs, hook_args
from headrace.hooks.slime_names import SLIME_IMPORTS
from headrace.hooks.trial.check import KINDS, CheckReport
from headrace.hooks.trial.check import check_hook as run_check
from headrace.job.hook_files import hooks_of
from headrace.job.load.load import read
from headrace.job.load.resolve import resolve
from headrace.rpc.log import drop_logs


@click.command()
@click.argument("path")
@click.option("--kind", type=click.Choice(KINDS), help="Kind of the hook (default: recognized by its arguments).")
@click.option("--job", type=PATH, help="Job whose values the hook gets (default: a job with every default).")
@click.option("--reward-model-path", help="Folder for a reward class (default: the job's).")
@json_option
def check_hook(path: str, kind: str | None, job: Path | None, reward_model_path: str | None, as_json: bool) -> int:
    """Loads a hook and tries it on samples.

    PATH is pkg.mod.fn or file.py:fn. Of file.py every function is tried that is a hook. The exit code is 1 when
    something failed.
    """
    drop_logs()
    reports = []
    for each in _paths(path):
        reports.append(run_check(each, kind, _job_args(job), reward_model_path))
        if not as_json:
            _print(reports[-1], with_path=each != path)
    if as_json:
        print_json(reports)
    return int(any(report.failed for report in reports))


def _print(report: CheckReport, *, with_path: bool) -> None:
    if with_path:
        print(report.path)
    for line in report.passed:
        print(f"ok      {line}")
    for line in report.failed:
        print(f"failed  {line}")


def _job_args(job: Path | None) -> HookArgs | None:
    if job is None:
        return None
    args = hook_args(resolve(read(job, [], os.environ)))
    if args.slime_imports:
        os.environ[SLIME_IMPORTS] = "true"  # for the process that loads the hook
    return args


def _paths(path: str) -> list[str]:
    """The path itself; for a file without a function, every function and class in it that a flag could name."""
    if not path.endswith(".py") or not Path(path).is_file():
        return [path]
    found = [f"{path}:{name}" for name in hooks_of(Path(path))]
    if not found:
        raise ConfigError(f"hook {path}: the file defines no function or class that a flag could name")
    return found
