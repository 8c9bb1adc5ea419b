"""A service's check as a process: `python -m services.X.check`, the job in a file, what the buffer found on stdin."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.job import Job
from headrace.errors import Internal
from headrace.launch.openmp import openmp
from headrace.preflight.report import Prompts
from headrace.rpc.log import drop_logs

_SECONDS = 180.0
_LAST_LINES = 6


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """`elsewhere`: the job is for another machine. `fast`: without what needs a tokenizer."""

    job: Job
    elsewhere: bool
    fast: bool


def serve_check(check: Callable[[CheckOptions, Prompts], Coroutine[Any, Any, msgspec.Struct]]) -> None:
    """The whole of a check's `__main__`: reads, runs, and writes the report as JSON. Log lines are nobody's to read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--fast", action="store_true")
    words = parser.parse_args()
    drop_logs()
    job = Job.model_validate_json(words.config.read_bytes())
    data = sys.stdin.buffer.read()
    prompts = msgspec.json.decode(data, type=Prompts) if data else Prompts()
    report = asyncio.run(check(CheckOptions(job, words.elsewhere, words.fast), prompts))
    sys.stdout.buffer.write(msgspec.json.encode(report))


class CheckProcess:
    """One of them, from its start, so that it loads while the buffer's reads."""

    def __init__(self, service: str, process: asyncio.subprocess.Process) -> None:
        self._service = service
        self._process = process

    @classmethod
    async def start(cls, service: str, config: Path, environment: dict[str, str], *flags: str) -> CheckProcess:
        """Of `services.SERVICE.check`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{service}.check", "--config", str(config), *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**environment, **openmp(1)},
        )
        return cls(service, process)

    async def result(self, data: bytes) -> bytes:
        """What it wrote, once it has `data`. Raises Internal with its last lines where it wrote nothing."""
        try:
            out, err = await asyncio.wait_for(self._process.communicate(data), _SECONDS)
        except TimeoutError as error:
            raise Internal(f"checking {self._service}'s part took longer than {_SECONDS:g} s") from error
        if self._process.returncode:
            last = "\n".join(err.decode(errors="replace").splitlines()[-_LAST_LINES:])
            raise Internal(f"checking {self._service}'s part failed:\n{last}")
        return out

    def kill(self) -> None:
        """Ends it where it still runs."""
        if self._process.returncode is None:
            self._process.kill()
