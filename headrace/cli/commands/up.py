"""`headrace up SERVICE --config JOB.toml [flags]`: one service here, in the foreground."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.job_arguments import load_job, wants_help
from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.launch.launcher import Launcher, until_signal, wait_for_orphans
from headrace.launch.specs import SERVICES, folder_here
from headrace.limits import did_you_mean
from headrace.preflight import require_startable
from headrace.process.exit_status import INTERRUPTED

_USAGE = """usage: headrace up SERVICE --config JOB.toml [flags]

SERVICE is one of {services}. It listens at its --SERVICE-address (a free port if absent) and finds the others at
theirs, or in the same run's folder: start buffer and reward first, then rollout, then trainer."""


def up(argv: Sequence[str]) -> int:
    """Serves until a signal and returns 0; a trainer ends by itself, and returns 130 where a signal was first."""
    if not argv or wants_help(argv):
        print(_USAGE.format(services=", ".join(SERVICES)))
        return 0
    service, words = argv[0], list(argv[1:])
    if service not in SERVICES:
        near = did_you_mean(service, SERVICES)
        raise ConfigError(f"unknown service {service}{near}; there are {', '.join(SERVICES)}")
    scope = Scope([service])
    job = load_job(_config_first(words), lambda _: scope)
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


def _config_first(words: list[str]) -> list[str]:
    """`--config PATH` anywhere becomes the job file in front."""
    if "--config" not in words:
        return words
    at = words.index("--config")
    if at + 1 == len(words):
        raise ConfigError("--config takes the path of a job file")
    path = Path(words[at + 1])
    return [str(path), *words[:at], *words[at + 2 :]]
