"""A buffer to talk to: in this process, or as a process of its own that may be killed."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2
from headrace.job.schema.job import Job
from headrace.job.schema.production import DataSection, RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.job.schema.services import BufferSection
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer, Service
from services.buffer.prompts.files import PromptFiles
from services.buffer.runtime.application import NO_USER_CODE, BufferApplication
from services.buffer.runtime.user_code import UserCode
from services.buffer.servicer import REQUEST_BYTES, BufferServicer
from services.buffer.store.base import Store
from services.buffer.wire import add_to_server
from tests.support.processes.with_constants import python_with

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def served_buffer(
    store: Store,
    *,
    address: str = "127.0.0.1:0",
    columns_folder: Path | None = None,
    user_code: UserCode = NO_USER_CODE,
    prompt_root: Path | None = None,
    max_column_bytes: int = 1 << 40,
    max_watch_lag: int = 100_000,
    min_free_disk_bytes: int = 0,
    retain_events: int | None = None,
    grace_seconds: float = 0.0,
    insecure: bool = False,
) -> AsyncIterator[tuple[BufferApplication, RpcServer]]:
    """A buffer on a free port of this process."""
    buffer = await BufferApplication.open(
        store,
        columns_folder=columns_folder,
        user_code=user_code,
        prompt_files=PromptFiles(prompt_root, None if prompt_root is None else ()),
        max_column_bytes=max_column_bytes,
        max_watch_lag=max_watch_lag,
        min_free_disk_bytes=min_free_disk_bytes,
        retain_events=retain_events,
    )
    name = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name
    service = Service(BufferServicer(buffer), add_to_server, name)
    server = RpcServer(
        "buffer",
        address,
        [service],
        insecure=insecure,
        request_bytes=REQUEST_BYTES,
        gate=buffer.pulse.require_store,
    )
    await server.start()
    buffer.pulse.listeners.append(server.set_serving)
    try:
        yield buffer, server
    finally:
        await server.stop(grace_seconds)
        await buffer.close()


class BufferProcess:
    """`python -m services.buffer` on one port and one data folder, started as often as one likes.

    `constants` are those that it has other values of, as MODULE:NAME=VALUE.
    """

    def __init__(
        self, folder: Path, prompts: Path | None, *, constants: Sequence[str] = (), **sections: object
    ) -> None:
        self._python = shlex.split(python_with(*constants)) if constants else [sys.executable]
        self.address = f"127.0.0.1:{free_port()}"
        self.folder = folder
        self._config = folder / "job.json"
        self._config.write_text(_job(prompts, **sections).model_dump_json())
        self._process: asyncio.subprocess.Process | None = None

    async def start(
        self,
        failpoint: str | None = None,
        large_call_bytes: int | None = None,
        metrics_address: str | None = None,
        *,
        arguments: Sequence[str] = (),
    ) -> None:
        """Returns at once; clients wait for it. With a failpoint (see `faulty_files`) its disk fails there.

        `arguments` are further ones of the service.
        """
        is_faulty = failpoint is not None or large_call_bytes is not None
        module = "tests.support.faults.faulty_buffer" if is_faulty else "services.buffer"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["HEADRACE_LARGE_CALL_BYTES"] = str(large_call_bytes or 1 << 20)
        if failpoint:
            environment["HEADRACE_FAILPOINT"] = failpoint
        self._process = await asyncio.create_subprocess_exec(
            *self._python, "-m", module, "--config", str(self._config), "--address", self.address,
            "--data-dir", str(self.folder / "ledger"),
            *(("--metrics-address", metrics_address) if metrics_address else ()), *arguments,
            cwd=ROOT, env=environment, stderr=(self.folder / "log").open("a"),
        )  # fmt: skip

    async def kill(self) -> None:
        """`kill -9`."""
        await self._end(signal.SIGKILL)

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        return await self._end(signal.SIGTERM)

    async def wait(self) -> int:
        """The exit status, once it ends by itself."""
        assert self._process
        return await self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process has had resident so far."""
        assert self._process
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def _end(self, number: signal.Signals) -> int:
        assert self._process
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()


def _job(prompts: Path | None, **sections: object) -> Job:
    fields: dict[str, object] = {
        "model": ModelSection(hf_checkpoint=Path("/none")),
        "data": DataSection(prompt_data=(str(prompts),) if prompts else ()),
        "rollout": RolloutSection(rollout_batch_size=4, n_samples_per_prompt=2),
        "buffer": BufferSection(max_staleness=1),
        **sections,
    }
    return Job(**fields)  # type: ignore[arg-type]
