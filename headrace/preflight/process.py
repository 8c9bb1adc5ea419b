"""A service's check as a process: `python -m services.X.check`, the job in a file, what the buffer found on stdin."""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import Internal
from headrace.job.schema.job import Job, read_job
from headrace.preflight.report import Prompts
from headrace.process.child import OneShot
from headrace.process.openmp import openmp
from headrace.rpc.log import drop_logs

READ_SECONDS = 20.0
_SECONDS = 180.0
_PROGRESS = "progress: "


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


def serve_check(check: Callable[[CheckOptions, ReadPrompts], Coroutine[Any, Any, msgspec.Struct]]) -> None:
    """The whole of a check's `__main__`: reads, runs, and writes the report as JSON. Log lines are nobody's to read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--read-seconds", type=float, default=READ_SECONDS)
    parser.add_argument("--try-functions", action="store_true")
    words = parser.parse_args()
    drop_logs()
    job = read_job(words.config)
    options = CheckOptions(job, words.elsewhere, words.fast, words.read_seconds, words.try_functions)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(check(options, _read_prompts))))


@functools.cache
def _read_prompts() -> Prompts:
    data = sys.stdin.buffer.read()
    return msgspec.json.decode(data, type=Prompts) if data else Prompts()


def tell_progress(sentence: str) -> None:
    """Called by a check: reports progress to the person who waits for it."""
    sys.stderr.write(f"{_PROGRESS}{sentence}\n")
    sys.stderr.flush()


class CheckProcess:
    """A check's process. It is started early, so that it loads while the buffer's check reads."""

    def __init__(self, service: str, process: OneShot) -> None:
        self._service = service
        self._process = process

    @classmethod
    async def start(
        cls, service: str, python: Sequence[str], config: Path, environment: dict[str, str], *flags: str
    ) -> CheckProcess:
        """Starts the module `services.SERVICE.check` with the job in a file, in the service's own Python."""
        command = [*python, "-m", f"services.{service}.check", "--config", str(config), *flags]
        return cls(service, await OneShot.start(command, {**environment, **openmp(1)}))

    async def result(self, data: bytes, tell: Callable[[str], None] = lambda _: None) -> bytes:
        """Sends `data` and returns the check's output. Raises Internal with the last lines of its log when it fails.

        `tell` gets its progress, a sentence at a time.
        """

        def takes(line: str) -> bool:
            is_progress = line.startswith(_PROGRESS)
            if is_progress:
                tell(line.removeprefix(_PROGRESS))
            return is_progress

        try:
            done = await self._process.result(data, seconds=_SECONDS, takes=takes)
        except TimeoutError as error:
            raise Internal(f"checking {self._service}'s part took longer than {_SECONDS:g} s") from error
        if done.exit_code:
            raise Internal(f"checking {self._service}'s part failed:\n" + "\n".join(done.last_lines))
        return done.out

    def kill(self) -> None:
        """Ends the process if it still runs."""
        self._process.kill()
