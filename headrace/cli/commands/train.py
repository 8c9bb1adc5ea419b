"""`headrace train JOB.toml [flags]`: starts what has no address, shows the run, ends it all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console

from headrace.cli.job_arguments import flags_help, load_job, wants_help
from headrace.cli.view.plan import in_short
from headrace.cli.view.run_view import RunView, follow, show
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.launch.launcher import Launcher, until_signal, wait_for_orphans
from headrace.launch.previous_run import is_finished, previous_run, resumption, saved_step
from headrace.launch.specs import folder_here, without_address
from headrace.preflight import require_startable
from headrace.process.exit_status import INTERRUPTED
from headrace.run_folder import RunFolder


def train(argv: Sequence[str]) -> int:
    """Returns 0 when the run is finished, 130 when it was interrupted."""
    if wants_help(argv):
        print("usage: headrace train [JOB.toml] [flags]\n", flags_help(argv))
        return 0
    job = load_job(argv)
    run = RunFolder.of(job)
    earlier = previous_run(run)
    if earlier is not None and is_finished(run, job):
        print(_finished(run, job.rollout.num_rollout))
        return 0
    if earlier is not None:
        print(f"{run.path}: {resumption(earlier, job)}", flush=True)
    return start(job, resumed_step=earlier.saved_step if earlier else 0)


def start(job: Job, *, resumed_step: int) -> int:
    """Checks the job, starts its services and shows them until the run ends."""
    services = without_address(job)
    wait_for_orphans(folder_here(job, services), services, lambda line: print(line, flush=True))
    print(f"{job.run.folder}: checking that the job can start", flush=True)
    found = require_startable(job, Scope.of_train(job))
    view = RunView(job.run, job.rollout.num_rollout, resumed_step=resumed_step)
    view.note(in_short(job))
    for warning in found.warnings:
        view.note(f"warning: {warning}")
    launcher = Launcher(job, services, view.note)
    return asyncio.run(_train(launcher, view))


def _finished(run: RunFolder, num_rollout: int) -> str:
    return (
        f"{run.path} has finished {num_rollout} of {num_rollout} steps: nothing is left to do; a larger --num-rollout "
        "continues from there, another --run-name starts a new run"
    )


def _interrupted(run: RunFolder, step: int, num_rollout: int) -> str:
    return f"{run.path}: interrupted; the same command continues " + (
        f"after step {step} of {num_rollout}" if step else "from the beginning: nothing was saved yet"
    )


async def _train(launcher: Launcher, view: RunView) -> int:
    console = Console()
    followers = [
        asyncio.create_task(follow(launcher.address_of, view, alone=launcher.job.debug.trains_alone)),
        asyncio.create_task(show(view, console)),
    ]
    try:
        finished = await until_signal(asyncio.create_task(launcher.run()), view.note, launcher.grace_seconds)
    finally:
        view.end()
        followers[0].cancel()
        await asyncio.gather(*followers, return_exceptions=True)
    folder = launcher.folder.path
    if not finished:
        print(
            _interrupted(launcher.folder, saved_step(launcher.folder, launcher.job), launcher.job.rollout.num_rollout)
        )
        return INTERRUPTED
    for line in view.summary():
        console.print(line, highlight=False)
    console.print(f"{folder}: metrics.jsonl, curves.png, checkpoints/, logs/", highlight=False, soft_wrap=True)
    return 0
