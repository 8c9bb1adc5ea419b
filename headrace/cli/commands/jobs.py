"""`headrace train | replay | check | up`: the commands that take a job, and the flags of one."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.cli.arg_types import PATH, json_option, print_json
from headrace.cli.job_arguments import JobCommand, load_job, note
from headrace.cli.runs import find_run
from headrace.cli.view.lines import compared
from headrace.cli.view.plan import in_short, plan, print_report, report_tree, too_little_memory
from headrace.cli.view.run_view import RunView, follow, show
from headrace.errors import ConfigError, FailedPrecondition, NotFound
from headrace.job.load.load import read
from headrace.job.load.resolve import resolve
from headrace.job.rules.rules import check as check_rules
from headrace.job.rules.scope import Scope, scope_of_check, services_here
from headrace.job.schema.job import Job
from headrace.job.schema.run import DebugSection
from headrace.launch.launcher import Launcher, until_signal, wait_for_orphans
from headrace.launch.previous_run import (
    checkpoints_of,
    is_finished,
    previous_run,
    require_shards,
    resumption,
    saved_step,
)
from headrace.launch.specs import SERVICES, folder_here
from headrace.limits import did_you_mean
from headrace.preflight import READ_SECONDS, Report, preflight, require_startable
from headrace.process.exit_status import INTERRUPTED
from headrace.recorded_steps import RecordedSteps
from headrace.run_folder import RunFolder

_REFUSED_EXIT_CODE = 2
_FAILED_EXIT_CODE = 1
_FAST_READ_SECONDS = 2.0


@click.command(cls=JobCommand)
def train(words: Sequence[str]) -> int:
    """Runs a job to its end. The exit code is 0 when the run is finished, 130 when it was interrupted.

    Without a JOB.toml it takes job.toml of this folder, if there is one.
    """
    return train_words(words)


def train_words(words: Sequence[str]) -> int:
    """`headrace train` with these words."""
    job = load_job(words)
    run = RunFolder.of(job)
    previous = previous_run(run)
    if previous is not None and is_finished(run, job):
        print(_finished(run, job.rollout.num_rollout))
        return 0
    if previous is not None:
        print(f"{run.path}: {resumption(previous, job)}", flush=True)
    return _start(job, resumed_step=previous.saved_step if previous else 0)


def _start(job: Job, *, resumed_step: int) -> int:
    """Checks the job, starts its services and shows them until the run ends."""
    services = services_here(job)
    wait_for_orphans(folder_here(job, services), services, _tell)
    _tell(f"{job.run.folder}: checking that the job can start")
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
    folder = launcher.folder
    if not finished:
        print(_interrupted(folder, saved_step(folder, launcher.job), launcher.job.rollout.num_rollout))
        return INTERRUPTED
    for line in view.summary():
        console.print(line, highlight=False)
    console.print(f"{folder.path}: metrics.jsonl, curves.png, checkpoints/, logs/", highlight=False, soft_wrap=True)
    return 0


@click.command(cls=JobCommand)
@click.argument("run")
@click.option("--from-step", type=int, default=0, metavar="K", help="Begin after K steps, with the checkpoint.")
def replay(run: str, from_step: int, words: Sequence[str]) -> int:
    """Trains the recorded steps of a run again (--save-debug-rollout-data), without engines, in a folder of its own.

    With the run's own settings the result is the same bit for bit. Flags change them, as another --lr does, and a table
    shows both side by side. The exit code is 0 when the recorded steps are trained, 130 when it was interrupted.
    """
    recorded = find_run(run)
    job = _replay_job(recorded, words)
    _require_step(job, from_step)
    folder = RunFolder.of(job)
    if folder.path.exists():
        raise FailedPrecondition(f"{folder.path} is there already: choose another --run-name")
    if from_step:
        _take_checkpoint(recorded, from_step, folder)
    code = _start(job, resumed_step=from_step)
    console = Console()
    for each in compared(recorded.metrics, folder.metrics, after=from_step):
        console.print(each, highlight=False, soft_wrap=True)
    return code


def _replay_job(recorded: RunFolder, flags: Sequence[str]) -> Job:
    """The run's job with `flags` over it, to be trained on its recorded steps in a folder beside it.

    Raises FailedPrecondition for a run that kept no steps, ConfigError for flags that make no job.
    """
    was = recorded.job()
    pattern = was.debug.save_debug_rollout_data
    if pattern is None:
        raise FailedPrecondition(
            f"{recorded.path} has kept no rollout steps: start a run with --save-debug-rollout-data "
            f"'{recorded.path}/recorded/{{rollout_id}}.samples'"
        )
    job = read(recorded.path / "job.toml", flags, os.environ, note)
    addresses = ("buffer_address", "rollout_address", "reward_address", "trainer_address")
    own = {
        "debug": DebugSection(load_debug_rollout_data=pattern),
        "run": _renamed(job, was),
        "services": job.services.model_copy(update=dict.fromkeys(addresses)),
        "buffer": job.buffer.model_copy(update={"buffer_shard": None}),
        "checkpoint": job.checkpoint.model_copy(update=_same_as(job, was, ("save", "load", "save_hf", "export_root"))),
    }
    job = resolve(job.model_copy(update=own))
    check_rules(job, Scope.of_train(job))
    return job


def _take_checkpoint(recorded: RunFolder, step: int, into: RunFolder) -> None:
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
        raise ConfigError(f"--from-step {step}: steps that were kept as {pattern}: {there}")


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


class _Check(JobCommand):
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["hook"]:
            from headrace.cli.check_hook import check_hook  # only here are hooks' kinds needed

            return check_hook.make_context(f"{info_name} hook", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Check)
@click.option(
    "--fast",
    is_flag=True,
    help="Skip what needs the tokenizer (the first prompt as the model sees it, lengths, a trial of generate functions "
    "and agents), and read prompts for 2 s at most instead of 20 s.",
)
@click.option(
    "--elsewhere",
    is_flag=True,
    help="The job is for another machine: missing files and GPUs are listed, and do not refuse the job.",
)
@json_option
def check(words: Sequence[str], fast: bool, elsewhere: bool, as_json: bool) -> int:
    """Prints the plan of a job and what every service found. `headrace check hook PATH` tries a hook.

    Without a JOB.toml it takes job.toml of this folder, if there is one.

    The exit code is 2 when a service refuses the job, with its sentence, and 1 when a service's check itself failed.
    """
    scopes: list[Scope] = []

    def scope_of(job: Job) -> Scope:
        scopes.append(scope_of_check(job, elsewhere=elsewhere))
        return scopes[-1]

    job = load_job(words, scope_of)
    read_seconds = _FAST_READ_SECONDS if fast else READ_SECONDS
    report = preflight(
        job,
        scopes[-1],
        fast=fast,
        read_seconds=read_seconds,
        tries=not fast,
        tell=lambda sentence: print(sentence, file=sys.stderr),
    )
    if "buffer" in scopes[-1].services:
        _check_ledger(job, report, scopes[-1])
    report.warnings += too_little_memory(job, scopes[-1])
    if as_json:
        print_json(report_tree(plan(job, scopes[-1]), report, scopes[-1]))
    else:
        print_report(Console(), plan(job, scopes[-1]), report, scopes[-1])
    return _REFUSED_EXIT_CODE if report.refusals else _FAILED_EXIT_CODE if report.failed else 0


def _check_ledger(job: Job, report: Report, scope: Scope) -> None:
    """Compares the job with the ledger that the run's folder has already."""
    try:
        require_shards(RunFolder.of(job), job.buffer)
    except ConfigError as error:
        report.refuse(error, elsewhere=scope.elsewhere is not None)


_TINKER_PORT = 8700


@click.command(cls=JobCommand, no_args_is_help=True)
@click.argument("api")
def serve(api: str, words: Sequence[str]) -> int:
    """Serves an API for training in place of a run of steps: `headrace serve tinker --hf-checkpoint MODEL`.

    Clients of the package tinker train models of LoRA on the base and sample from them, at --tinker-port (8700 if
    absent). It runs until Ctrl-C; the same command goes on with the models that were there.
    """
    if api != "tinker":
        raise ConfigError(f"unknown API {api[:80]}{did_you_mean(api, ['tinker'])}; there is tinker")
    given = any(word.split("=")[0] == "--tinker-port" for word in words)
    job = load_job(words if given else [*words, "--tinker-port", str(_TINKER_PORT)])
    services = services_here(job)
    wait_for_orphans(folder_here(job, services), services, _tell)
    for warning in require_startable(job, Scope.of_train(job)).warnings:
        _tell(f"warning: {warning}")
    address = f"http{'s' if job.services.tls_dir else ''}://{job.tinker.tinker_host}:{job.tinker.tinker_port}"
    _tell(f"Tinker's API will be at {address}: TINKER_BASE_URL={address} TINKER_API_KEY=tml-local")
    return 0 if asyncio.run(_up(Launcher(job, services, _tell))) else INTERRUPTED


@click.command(cls=JobCommand, no_args_is_help=True)
@click.argument("service")
@click.option("--config", type=PATH, metavar="JOB.toml", help="The job.")
def up(service: str, config: Path | None, words: Sequence[str]) -> int:
    """Runs one service here until a signal: buffer, reward, rollout or trainer.

    It listens at its --SERVICE-address (a free port if absent) and finds the others at theirs, or in the same run's
    folder: start buffer and reward first, then rollout, then trainer. A trainer ends by itself. The exit code is 130
    where a signal ended it before.
    """
    if service not in SERVICES:
        near = did_you_mean(service, SERVICES)
        raise ConfigError(f"unknown service {service}{near}; there are {', '.join(SERVICES)}")
    scope = Scope([service])
    job = load_job([str(config), *words] if config else words, lambda _: scope)
    wait_for_orphans(folder_here(job, [service]), [service], _tell)
    for warning in require_startable(job, scope).warnings:
        _tell(f"warning: {warning}")
    finished = asyncio.run(_up(Launcher(job, [service], _tell)))
    return 0 if finished or service != "trainer" else INTERRUPTED


async def _up(launcher: Launcher) -> bool:
    """Runs until a signal. True where a trainer has finished the run before one."""
    return await until_signal(asyncio.create_task(launcher.run()), _tell, launcher.grace_seconds)


def _tell(line: str) -> None:
    print(line, flush=True)
