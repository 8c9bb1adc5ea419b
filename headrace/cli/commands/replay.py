"""`headrace replay RUN [--from-step K] [flags]`: trains the rollout steps of an earlier run again, without engines."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headrace.cli.commands.train import start
from headrace.cli.job_arguments import note
from headrace.cli.runs import find_run
from headrace.cli.view.lines import compared
from headrace.errors import ConfigError, FailedPrecondition, NotFound
from headrace.job.load.load import read
from headrace.job.load.resolve import resolve
from headrace.job.rules.rules import check
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.run import DebugSection
from headrace.launch.previous_run import checkpoints_of
from headrace.recorded_steps import RecordedSteps
from headrace.run_folder import RunFolder

_USAGE = "headrace replay RUN [--from-step K] [flags of headrace train]"
_DESCRIPTION = """Trains the rollout steps of a run that kept them (--save-debug-rollout-data) again, in a folder of its
own and without engines. With the run's own settings the result is the same bit for bit; flags change them, as another
--lr does, and a table shows both side by side."""


def replay(argv: Sequence[str]) -> int:
    """Returns 0 when the recorded steps are trained, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(prog="headrace replay", usage=_USAGE, description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name in runs/")
    parser.add_argument(
        "--from-step", type=int, default=0, metavar="K", help="begin after K steps, with the checkpoint"
    )
    args, flags = parser.parse_known_args(argv)
    recorded = find_run(args.run)
    job = replay_job(recorded, flags)
    _require_step(job, args.from_step)
    folder = RunFolder.of(job)
    if folder.path.exists():
        raise FailedPrecondition(f"{folder.path} is there already: choose another --run-name")
    if args.from_step:
        take_checkpoint(recorded, args.from_step, folder)
    code = start(job, resumed_step=args.from_step)
    console = Console()
    for each in compared(recorded.metrics, folder.metrics, after=args.from_step):
        console.print(each, highlight=False, soft_wrap=True)
    return code


def replay_job(recorded: RunFolder, flags: Sequence[str]) -> Job:
    """The run's job with `flags` over it, to be trained on its recorded steps in a folder beside it.

    Raises FailedPrecondition for a run that kept no steps, ConfigError for flags that make no job.
    """
    pattern = recorded.job().debug.save_debug_rollout_data
    if pattern is None:
        raise FailedPrecondition(
            f"{recorded.path} has kept no rollout steps: start a run with --save-debug-rollout-data "
            f"'{recorded.path}/recorded/{{rollout_id}}.samples'"
        )
    job = read(recorded.path / "job.toml", flags, os.environ, note)
    was = recorded.job()
    own = {
        "debug": DebugSection(load_debug_rollout_data=pattern),
        "run": _renamed(job, was),
        "services": job.services.model_copy(
            update=dict.fromkeys(("buffer_address", "rollout_address", "reward_address", "trainer_address"))
        ),
        "buffer": job.buffer.model_copy(update={"buffer_shard": None}),
        "checkpoint": job.checkpoint.model_copy(update=_same_as(job, was, ("save", "load", "save_hf", "export_root"))),
    }
    job = resolve(job.model_copy(update=own))
    check(job, Scope.of_train(job))
    return job


def take_checkpoint(recorded: RunFolder, step: int, into: RunFolder) -> None:
    """Links a step's checkpoint into the new run's folder; copies it where that is another disk.

    Raises NotFound when the run kept none of this step.
    """
    found = checkpoints_of(recorded, recorded.job())
    if step not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise NotFound(
            f"{recorded.path} has no checkpoint after step {step}; there are: 0 (the start), {there}. --save-interval "
            "and --keep-last of a run say which it keeps"
        )
    target = into.path / "checkpoints" / found[step].name
    try:
        shutil.copytree(found[step], target, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(found[step], target)


def _require_step(job: Job, step: int) -> None:
    pattern = job.debug.load_debug_rollout_data
    assert pattern is not None
    steps = RecordedSteps(pattern).steps()
    if step < 0 or step not in steps:
        there = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ConfigError(f"--from-step {step}: steps that were kept as {pattern}: {there}", field="from_step")


def _renamed(job: Job, was: Job) -> object:
    if job.run.run_name != was.run.run_name or job.run.run_dir != was.run.run_dir:
        return job.run
    name, number = f"{was.run.run_name}-replay", 2
    while (Path(job.run.run_dir) / name).exists():
        name, number = f"{was.run.run_name}-replay-{number}", number + 1
    return job.run.model_copy(update={"run_name": name})


def _same_as(job: Job, was: Job, names: Sequence[str]) -> dict[str, None]:
    """Returns the options that still name the recorded run's folders: a replay leaves those as they are."""
    return {name: None for name in names if getattr(job.checkpoint, name) == getattr(was.checkpoint, name)}
