"""`headrace watch | pause | resume | save | stop | down`: watches and controls a live run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click
from rich.console import Console

from headrace.cli.arg_types import run_argument
from headrace.cli.runs import address_of, find_run
from headrace.cli.view.lines import duration
from headrace.cli.view.run_view import RunView, follow, show
from headrace.client.trainer import TrainerClient
from headrace.errors import FailedPrecondition
from headrace.launch.launcher import launchers
from headrace.launch.previous_run import has_ended
from headrace.launch.process import grace_seconds
from headrace.run_folder import RunFolder

_POLL_SECONDS = 0.5
_SAID_EVERY_SECONDS = 5.0

T = TypeVar("T")


@click.command()
@run_argument
def watch(run: str | None) -> int:
    """Shows a live run as `headrace train` shows it: a table in a terminal, lines elsewhere.

    It returns when the run has ended. Ctrl-C ends the command alone; the run continues.
    """
    folder = find_run(run)
    if has_ended(folder):
        raise FailedPrecondition(f"{folder.path} has ended: `headrace status {folder.path}` says how")
    asyncio.run(_watch(folder))
    return 0


async def _watch(folder: RunFolder) -> None:
    job = folder.job()
    view = RunView(job.run, job.rollout.num_rollout)
    tasks = [
        asyncio.create_task(follow(lambda service: folder.services()[service].address, view)),
        asyncio.create_task(show(view, Console())),
    ]
    try:
        while not has_ended(folder) and not view.trainer_has_ended:  # the latter for services of `headrace up`
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        view.end()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@click.command()
@run_argument
def pause(run: str | None) -> int:
    """Pauses training before the next step. The services stay up, and `headrace resume` continues."""
    step = _ask(run, TrainerClient.pause)
    print(f"paused before step {step + 1}: `headrace resume` continues")
    return 0


@click.command()
@run_argument
def resume(run: str | None) -> int:
    """Continues a run that `headrace pause` paused."""
    _ask(run, TrainerClient.resume)
    print("training continues")
    return 0


@click.command()
@run_argument
def save(run: str | None) -> int:
    """Writes a checkpoint after the current step, and returns when it is on the disk."""
    _tell("the trainer saves after its current step")
    began = time.monotonic()
    reply = _ask(run, TrainerClient.save_checkpoint)
    print(f"{reply.path} written after {duration(time.monotonic() - began)}")
    return 0


@click.command()
@run_argument
def stop(run: str | None) -> int:
    """Ends a run after its current step, with a checkpoint. The command that started the run continues it later."""
    folder = find_run(run)
    step = asyncio.run(_asked(address_of(str(folder.path), "trainer"), TrainerClient.stop))
    _tell(f"{folder.path} saves and ends before step {step + 1}")
    return asyncio.run(_until(lambda: has_ended(folder), "the run", _patience(folder)))


@click.command()
@run_argument
def down(run: str | None) -> int:
    """Ends all services of a run that were started on this machine, as Ctrl-C where they were started does.

    The trainer finishes its step and saves first. Services on other machines continue.
    """
    folder = find_run(run)
    pids = launchers(folder)
    if not pids:
        raise FailedPrecondition(f"no service of {folder.path} runs on this machine")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    _tell(f"{folder.path}: its services end after the current step, {grace_seconds(folder.metrics):.0f} s at most")
    return asyncio.run(_until(lambda: not launchers(folder), "the services", _patience(folder)))


def _ask(run: str | None, method: Callable[[TrainerClient], Awaitable[T]]) -> T:
    return asyncio.run(_asked(address_of(run, "trainer"), method))


async def _asked(address: str, method: Callable[[TrainerClient], Awaitable[T]]) -> T:
    async with TrainerClient(address) as trainer:
        return await method(trainer)


def _patience(folder: RunFolder) -> float:
    """Time for the step, its checkpoint, and each service's own end."""
    return 4 * grace_seconds(folder.metrics) + 60.0


async def _until(is_over: Callable[[], bool], what: str, seconds: float) -> int:
    """Returns 0 once it is over, 1 after `seconds`; says every few seconds that it waits."""
    began = said = time.monotonic()
    while not is_over():
        now = time.monotonic()
        if now - began > seconds:
            print(f"{what} did not end after {duration(now - began)}: see `headrace status`")
            return 1
        if now - said > _SAID_EVERY_SECONDS:
            said = now
            _tell(f"waiting for the end, {now - began:.0f} s so far")
        await asyncio.sleep(_POLL_SECONDS)
    print(f"{what} ended after {duration(time.monotonic() - began)}")
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)
