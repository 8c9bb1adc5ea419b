"""`headrace check hook PATH`: loads a hook and tries it on samples, with a job's own arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.hooks import HookArgs, hook_args
from headrace.hooks.slime_names import SLIME_IMPORTS
from headrace.hooks.trial.check import KINDS
from headrace.hooks.trial.check import check_hook as run_check
from headrace.job.hook_files import hooks_of
from headrace.job.load.load import read
from headrace.job.load.resolve import resolve
from headrace.rpc.log import drop_logs


def check_hook(argv: Sequence[str]) -> int:
    """Returns 1 when something failed."""
    parser = argparse.ArgumentParser(prog="headrace check hook", description="Loads a hook and tries it on samples.")
    parser.add_argument("path", help="pkg.mod.fn or file.py:fn; file.py tries every function in it that is a hook")
    parser.add_argument("--kind", choices=KINDS, help="kind of the hook (default: recognized by its arguments)")
    parser.add_argument("--job", type=Path, help="job whose values the hook gets (default: a job with every default)")
    parser.add_argument("--reward-model-path", help="folder for a reward class (default: the job's)")
    args = parser.parse_args(argv)
    drop_logs()
    return max(_tried(path, args) for path in _paths(args.path))


def _tried(path: str, args: argparse.Namespace) -> int:
    report = run_check(path, args.kind, _job_args(args.job), args.reward_model_path)
    if path != args.path:
        print(path)
    for line in report.passed:
        print(f"ok      {line}")
    for line in report.failed:
        print(f"failed  {line}")
    return 1 if report.failed else 0


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
