"""Every service's check of its own part: what `headrace check` prints, and `headrace train` refuses before it starts.

The buffer's check reads the prompts; the others load meanwhile, and get them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, Internal
from headrace.hooks.slime_names import slime_environment
from headrace.job.rules.scope import Scope
from headrace.job.rules.warnings import warnings
from headrace.job.schema.job import Job
from headrace.preflight.process import CheckProcess
from headrace.preflight.report import BufferReport, Prompts, Report

_READ_SECONDS_AT_START = 5.0
_CHECKED = ("reward", "rollout", "trainer")


def preflight(
    job: Job,
    scope: Scope,
    *,
    fast: bool,
    read_seconds: float,
    tries: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Reports the findings of all services that `scope` starts. `fast` skips what needs the tokenizer.

    Prompts are read for `read_seconds` at most; `tell` gets the progress. `tries` calls generate functions and agents.
    """
    report = Report(warnings=warnings(job), unchecked=list(scope.unchecked))
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        config = Path(folder) / "job.json"
        config.write_text(job.model_dump_json())
        flags = [
            *(["--elsewhere"] if scope.elsewhere else []),
            *(["--fast"] if fast else []),
            *(["--try-functions"] if tries else []),
        ]
        flags += ["--read-seconds", str(read_seconds)]
        asyncio.run(_run(job, scope, config, flags, report, tell))
    return report


def require_startable(job: Job, scope: Scope) -> Report:
    """Returns the report. Raises ConfigError with every refusal, one per line, before anything is started."""
    report = preflight(job, scope, fast=False, read_seconds=_READ_SECONDS_AT_START)
    if report.refusals:
        raise ConfigError("\n".join(report.refusals))
    return report


async def _run(
    job: Job, scope: Scope, config: Path, flags: Sequence[str], report: Report, tell: Callable[[str], None]
) -> None:
    services = [name for name in _CHECKED if name in scope.services and (name != "trainer" or _has_to_look(job))]
    environment = {**os.environ, **slime_environment(job.run.slime_imports)}
    started: list[CheckProcess] = []

    async def start(service: str) -> CheckProcess:
        return await CheckProcess.start(service, job.services.python_of(service), config, environment, *flags)

    try:
        if "buffer" in scope.services:
            started.append(await start("buffer"))
        others = [await start(name) for name in services]
        started += others
        prompts = await _prompts(started[0], report, tell) if "buffer" in scope.services else Prompts()
        data = msgspec.json.encode(prompts)
        for found in await asyncio.gather(*(_report(other, data) for other in others)):
            report.join(found)
    finally:
        for process in started:
            process.kill()


async def _prompts(buffer: CheckProcess, report: Report, tell: Callable[[str], None]) -> Prompts:
    try:
        found = msgspec.json.decode(await buffer.result(b"", tell), type=BufferReport)
    except Internal as error:
        report.failed.append(error.message)
        return Prompts()
    report.join(found.report)
    return found.prompts


async def _report(process: CheckProcess, data: bytes) -> Report:
    """A failing check refuses nothing: its error is kept in the report, and the service will check again."""
    try:
        return msgspec.json.decode(await process.result(data), type=Report)
    except Internal as error:
        return Report(failed=[error.message])


def _has_to_look(job: Job) -> bool:
    """The trainer's check has its hooks to load, and adapters to know about."""
    return job.lora.lora_rank is not None or any(path is not None for _, path in job.hooks)
