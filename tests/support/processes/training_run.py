"""A whole run for end-to-end tests: `headrace train` as a person starts it, watched and hurt from outside."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.api.buffer.v1 import buffer_pb2
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.launch.health import is_serving
from headrace.run_folder import RunFolder
from headrace.trajectory import Sample
from services.buffer.build import store_of_job
from services.buffer.store.base import Store
from tests.support.processes.buffer_server import served_buffer
from tests.support.processes.with_constants import python_with

ROOT = Path(__file__).parents[3]
STREAM = "train"


SUMS = tuple({"prompt": f"What is {i} + {i}?", "label": str(2 * i)} for i in range(64))
_SHAPE = {
    "--label-key": "label",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "8",
    "--rollout-max-response-len": "12",
    "--micro-batch-size": "8",
    "--actor-num-gpus-per-node": "2",
    "--rollout-num-gpus": "2",
}
"""Unless the flags say otherwise."""


class TrainingRun:
    """`headrace train` over a tiny model, with two engines and two ranks, or as the flags say."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *flags: str,
        prompts: Sequence[Mapping[str, Any]] = SUMS,
        program: Sequence[str] = ("train",),
        name: str = "e2e",
        environment: Mapping[str, str] | None = None,
        code: Path = ROOT,
        where: Sequence[str] = (),
        constants: Sequence[str] = (),
    ) -> None:
        """`code` is the tree whose headrace runs, `where` the words that start the command in a host of its own.

        `constants` are those that the launcher has other values of, as MODULE:NAME=VALUE.
        """
        self.folder = RunFolder(folder / "runs" / name)
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        shape = [word for flag, value in _SHAPE.items() if flag not in flags for word in (flag, value)]
        python = shlex.split(python_with(*constants)) if constants else [sys.executable]
        self.command = [
            *where, *python, "-m", "headrace.cli.main", *program,
            "--run-name", name, "--run-dir", str(folder / "runs"), "--hf-checkpoint", str(checkpoint),
            "--prompt-data", str(self.prompts), *shape, *flags,
        ]  # fmt: skip
        self.export = folder / "export"
        self.log = folder / f"launcher-{name}.log"
        self._code = code
        self._environment = _environment() | {"PYTHONPATH": str(code)} | dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the launcher, once it is started."""
        assert self._process is not None
        return self._process.pid

    @asynccontextmanager
    async def started(self) -> AsyncIterator[TrainingRun]:
        """Ended by SIGTERM when the block is left, by SIGKILL when that does not help."""
        with self.log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, cwd=self._code, env=self._environment, stdout=output, stderr=output
            )
        try:
            yield self
        finally:
            if self._process.returncode is None:
                self._process.terminate()
                try:
                    await asyncio.wait_for(self._process.wait(), 300)
                except TimeoutError:
                    self._process.kill()

    async def finished(self) -> None:
        """Waits for the end. Raises AssertionError with the logs' last lines unless it is a good one."""
        assert self._process is not None
        code = await self._process.wait()
        assert code == 0, self.last_words()

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None while it runs."""
        assert self._process is not None
        return self._process.returncode

    @property
    def is_running(self) -> bool:
        """False once it has ended."""
        return self._process is not None and self._process.returncode is None

    async def until_serving(self, service: str) -> None:
        """Waits until it answers that it serves. Raises AssertionError when the run ends before it."""
        while not await is_serving(self.folder.services()[service].address):
            assert self.is_running, self.last_words()
            await asyncio.sleep(0.1)

    async def until_told(self, words: str) -> None:
        """Waits until the launcher has printed the words. Raises AssertionError when the run ends before it."""
        while words not in self.log.read_text(errors="replace"):
            assert self.is_running, self.last_words()
            await asyncio.sleep(0.05)

    async def until_step(self, step: int) -> None:
        """Waits until a step is reported. Raises AssertionError when the run ends before it."""
        assert self._process is not None
        while max((row["step"] for row in self.metrics()), default=0) < step:
            assert self._process.returncode is None, self.last_words()
            await asyncio.sleep(0.1)

    async def address_of(self, service: str) -> str:
        """Waits until it is known."""
        assert self._process is not None
        while not self.folder.services_file.is_file():
            assert self._process.returncode is None, self.last_words()
            await asyncio.sleep(0.1)
        return self.folder.services()[service].address

    def kill(self, service: str) -> int:
        """`kill -9` of one service; returns the pid that is gone."""
        pid = self.folder.services()[service].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        return _json_lines(self.folder.path / "metrics.jsonl")

    def trained(self) -> dict[int, list[str]]:
        """Step → the sample ids that it was fed, by the trainer's own record; the last run of a step counts."""
        return {row["step"]: row["sample_ids"] for row in _json_lines(self.folder.path / "trained.jsonl")}

    def events(self, service: str) -> list[dict[str, Any]]:
        """What a service logged, the lines of programs that it started left out."""
        lines = (self.folder.logs / f"{service}.log").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def last_words(self) -> str:
        """The end of every log, for a failed assertion."""
        logs = [self.log, *sorted(self.folder.logs.glob("*.log"))]
        return "\n".join(f"── {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _store(self) -> Store:
        """The ledger's files, as the run's own job names them."""
        return store_of_job(Job.model_validate_json(self.folder.job_file.read_text()), self.folder.ledger)

    async def history(self) -> list[buffer_pb2.LedgerEvent]:
        """All that the ledger wrote down, read from its files after the run."""
        async with (
            served_buffer(self._store()) as (buffer, server),
            BufferClient(server.address) as client,
        ):
            events: list[buffer_pb2.LedgerEvent] = []
            async for event in client.watch(STREAM):
                events.append(event)
                if event.position == buffer.ledger.position:
                    break
            return events

    async def groups(self) -> list[buffer_pb2.Group]:
        """Every group that the ledger knows, read from its files after the run."""
        async with (
            served_buffer(self._store()) as (_, server),
            BufferClient(server.address) as client,
        ):
            found: list[buffer_pb2.Group] = []
            token = ""
            while True:
                page = await client.list_groups(STREAM, page_size=1000, page_token=token)
                found.extend(page.groups)
                token = page.next_page_token
                if not token:
                    return found


def consumed_by_step(events: list[buffer_pb2.LedgerEvent]) -> Mapping[int, list[str]]:
    """Step → group ids that are consumed in the end, after every rewind."""
    last: dict[str, tuple[int, int]] = {}
    for event in events:
        if event.kind == "consumed":
            last[event.group_id] = (event.step, event.position)
        elif event.kind == "rewound" and event.group_id:
            last.pop(event.group_id, None)
    steps: dict[int, list[str]] = {}
    for group_id, (step, _) in sorted(last.items(), key=lambda item: item[1][1]):
        steps.setdefault(step, []).append(group_id)
    return steps


def unpacked(samples: list[Any]) -> list[Sample]:
    """Samples with payload, opened."""
    return [Sample.unpack(sample) for sample in samples]


def _environment() -> dict[str, str]:
    """Without the tests' own variables, which would be unknown ones of the job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
