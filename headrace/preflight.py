"""Every service's check of its own part: what `headrace check` prints, and `headrace train` refuses before it starts.

Each is `python -m services.X.check` in the service's own Python: it builds the service's parts without starting them.
The buffer's reads the prompts; the others load meanwhile, and get them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, HeadraceError, Internal
from headrace.hooks.slime_names import slime_environment
from headrace.job.rules.rules import warnings
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job, read_job
from headrace.process.child import OneShot
from headrace.process.computing import openmp
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import drop_logs

READ_SECONDS = 20.0
LOAD_SECONDS = 120.0
_READ_SECONDS_AT_START = 5.0
_CHECK_SECONDS = 180.0
_PROGRESS = "progress: "


class PromptRow(msgspec.Struct, frozen=True):
    """A prompt as the buffer will give it, serialized; `where` is its file and line."""

    where: str
    body: bytes

    def prompt(self) -> sample_pb2.Prompt:
        return sample_pb2.Prompt.FromString(self.body)


class Scorers(msgspec.Struct, frozen=True):
    """The number of rows that name an rm_type, and the first of them."""

    count: int
    where: str


class Prompts(msgspec.Struct):
    """What the buffer's check read for the others: some rows, and the rm_types of all."""

    rows: list[PromptRow] = []
    rm_types: dict[str, Scorers] = {}
    """Scorers by name; "" for rows that name none."""
    num_rows: int = 0


class Report(msgspec.Struct):
    """What a check found, as sentences for a person. Anything in `refusals` keeps the run from starting."""

    facts: list[tuple[str, str]] = []
    """(what, how)"""
    refusals: list[str] = []
    warnings: list[str] = []
    unchecked: list[str] = []
    failed: list[str] = []
    """Why a service's check ended without a result."""
    prompts: Prompts = msgspec.field(default_factory=Prompts)
    """The buffer's"""

    def join(self, other: Report) -> None:
        """Adds the findings of another service."""
        for mine, others in (
            (self.facts, other.facts),
            (self.refusals, other.refusals),
            (self.warnings, other.warnings),
            (self.unchecked, other.unchecked),
            (self.failed, other.failed),
        ):
            mine += others  # type: ignore[operator]

    def refuse(self, error: HeadraceError, *, elsewhere: bool = False) -> None:
        """Notes the error as unchecked when the job is for another machine."""
        (self.unchecked if elsewhere else self.refusals).append(error.message)


def scorer_name(metadata: Mapping[str, Any]) -> str:
    """A row's `rm_type`; "" where it names none."""
    named = metadata.get("rm_type")
    return "" if named is None else named if isinstance(named, str) else f"{named!r:.80}"


def count_scorer(rm_types: dict[str, Scorers], name: str, where: str) -> bool:
    """True for the first row that names it."""
    before = rm_types.get(name)
    rm_types[name] = Scorers(before.count + 1, before.where) if before else Scorers(1, where)
    return before is None


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`elsewhere`: the job is for another machine. `fast`: without what needs a tokenizer.

    `read_seconds` is how long prompts are read at most; what is left then is only counted. `tries` says that generate
    functions and agents are called once, with an engine that stands in for the real one.
    """

    job: Job
    elsewhere: bool
    fast: bool
    read_seconds: float = READ_SECONDS
    tries: bool = False


ReadPrompts = Callable[[], Prompts]
"""Waits for what the buffer's check found: a check that loads first has loaded by then."""


def serve_check(check: Callable[[CheckOptions, ReadPrompts], Coroutine[Any, Any, Report]]) -> None:
    """The whole of a check's `__main__`: reads the job and its options, checks, and writes the report as JSON."""
    job_file, options = sys.argv[1:]
    drop_logs()
    report = asyncio.run(check(CheckOptions(read_job(Path(job_file)), **json.loads(options)), _read_prompts))
    sys.stdout.buffer.write(msgspec.json.encode(report))


@functools.cache
def _read_prompts() -> Prompts:
    data = sys.stdin.buffer.read()
    return msgspec.json.decode(data, type=Prompts) if data else Prompts()


def tell_progress(sentence: str) -> None:
    """Called by a check: reports progress to the person who waits for it."""
    sys.stderr.write(f"{_PROGRESS}{sentence}\n")
    sys.stderr.flush()


@asynccontextmanager
async def hook_pool(options: CheckOptions, report: Report, pool: WorkerPool | None = None) -> AsyncIterator[WorkerPool]:
    """A pool for one hook at a time, or the given one, closed at the end. A hook's failure ends the block, refused.

    A hook is loaded in a worker, so that what it imports or breaks is not the check's concern.
    """
    pool = pool or WorkerPool(1)
    try:
        with refused_in(report, options):
            yield pool
    finally:
        await pool.close()


@contextmanager
def refused_in(report: Report, options: CheckOptions) -> Iterator[None]:
    """A hook's failure ends the block and is a refusal; where the job is for another machine, it is only unchecked."""
    try:
        yield
    except WorkerError as error:
        report.refuse(ConfigError(error.message), elsewhere=options.elsewhere)


def preflight(
    job: Job,
    scope: Scope,
    *,
    fast: bool,
    read_seconds: float,
    tries: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Reports the findings of all services that `scope` starts; `tell` gets the progress."""
    options = {"elsewhere": bool(scope.elsewhere), "fast": fast, "read_seconds": read_seconds, "tries": tries}
    report = Report(warnings=warnings(job), unchecked=list(scope.unchecked))
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(job.model_dump_json())
        asyncio.run(_check_services(job, scope, (str(job_file), json.dumps(options)), report, tell))
    return report


def require_startable(job: Job, scope: Scope) -> Report:
    """Returns the report. Raises ConfigError with every refusal, one per line, before anything is started."""
    report = preflight(job, scope, fast=False, read_seconds=_READ_SECONDS_AT_START)
    if report.refusals:
        raise ConfigError("\n".join(report.refusals))
    return report


async def _check_services(
    job: Job, scope: Scope, words: Sequence[str], report: Report, tell: Callable[[str], None]
) -> None:
    environment = {**os.environ, **slime_environment(job.run.slime_imports), **openmp(1)}
    has_hooks = any(path is not None for _, path in job.hooks)
    services = [name for name in ("buffer", "reward", "rollout", "trainer") if name in scope.services]
    started: dict[str, OneShot] = {}
    try:
        for name in services:
            if name != "trainer" or has_hooks:
                command = [*job.services.python_of(name), "-m", f"services.{name}.check", *words]
                started[name] = await OneShot.start(command, environment)
        of_buffer = await report_of("buffer", started["buffer"], b"", tell) if "buffer" in started else Report()
        report.join(of_buffer)
        data = msgspec.json.encode(of_buffer.prompts)
        others = [report_of(name, process, data, tell) for name, process in started.items() if name != "buffer"]
        for found in await asyncio.gather(*others):
            report.join(found)
    finally:
        for process in started.values():
            process.kill()


async def report_of(service: str, process: OneShot, data: bytes, tell: Callable[[str], None]) -> Report:
    """Sends `data` to a service's check and returns its report; `tell` gets its progress, a sentence at a time.

    A check that fails refuses nothing: the last lines of its log are in the report, and the service will check again.
    """

    def takes(line: str) -> bool:
        is_progress = line.startswith(_PROGRESS)
        if is_progress:
            tell(line.removeprefix(_PROGRESS))
        return is_progress

    try:
        done = await process.result(data, seconds=_CHECK_SECONDS, takes=takes)
    except TimeoutError:
        return Report(failed=[f"checking {service}'s part took longer than {_CHECK_SECONDS:g} s"])
    except Internal as error:
        return Report(failed=[error.message])
    if done.exit_code:
        return Report(failed=[f"checking {service}'s part failed:\n" + "\n".join(done.last_lines)])
    return msgspec.json.decode(done.out, type=Report)
