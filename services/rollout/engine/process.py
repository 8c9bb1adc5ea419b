"""An engine's server: a child process, or one that somebody else starts. A fake may implement the protocol, too."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import ConfigError, FailedPrecondition, HeadraceError, Unavailable
from headrace.process import memory
from headrace.process.child import Child
from headrace.process.exit_status import meaning
from headrace.process.log_file import last_words
from headrace.process.scratch import Scratch
from headrace.rpc.net import Address, free_port
from services.rollout.engine import arguments, launch
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import BadAnswer

_POLL_SECONDS = 0.25


class EngineProcess(Protocol):
    """A server that is started once. A restart is another EngineProcess."""

    url: str

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers. Raises Unavailable (ENGINE_START_FAILED) when it does not."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""

    async def wait(self) -> int:
        """Returns the exit code once the process has ended."""

    async def stop(self, grace_seconds: float = 8.0) -> None:
        """Ends the process and everything that it started."""

    def memory_bytes(self) -> int | None:
        """Returns the memory of this machine that it takes now; None where nobody knows, as of other machines."""
        return None

    @property
    def resident_bytes(self) -> int | None:
        """The most memory that it had in the last half minute; None where nobody looks."""
        return None

    def last_lines(self) -> str:
        """Returns the end of the log."""


EngineFactory = Callable[[int], EngineProcess]
"""Makes the server of an engine's number; it is not started yet."""


class ServerProcess(EngineProcess):
    """A process with SGLang's HTTP interface at `url`."""

    def __init__(self, url: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self.url = url
        self._child = Child(command, log_path, environment, asks_group=True)

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers. Raises Unavailable with its last log lines when it does not."""
        await self._child.start()
        end = time.monotonic() + seconds
        async with EngineClient(self.url) as client:
            while not await _answers(client):
                if self._child.exit_code is not None:
                    raise self._not_started(f"ended with {meaning(self._child.exit_code, self.resident_bytes)}")
                if time.monotonic() > end:
                    await self.stop()
                    raise self._not_started(f"did not answer within {seconds:g} s")
                await asyncio.sleep(_POLL_SECONDS)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        return self._child.exit_code

    async def wait(self) -> int:
        return await self._child.wait()

    async def stop(self, grace_seconds: float = 8.0) -> None:
        await self._child.stop(grace_seconds)

    def memory_bytes(self) -> int | None:
        """Returns the memory of its process and those below it."""
        return memory.of_tree(self.pid) if self.exit_code is None else None

    @property
    def resident_bytes(self) -> int | None:
        return self._child.resident_bytes

    def last_lines(self) -> str:
        return self._child.last_lines()

    def _not_started(self, what: str) -> HeadraceError:
        if self._child.exit_code == launch.REFUSED:
            said = last_words(launch.NAME, self._child.log_file, self._child.log_start)
            return ConfigError(said.removeprefix(f"{launch.NAME}: "))
        return Unavailable(
            f"the engine {what} while starting; the end of {self._child.log_file}:\n{self.last_lines()}",
            reason="ENGINE_START_FAILED",
        )


class SglangProcess(ServerProcess):
    """A real engine. Its ranks meet by a file: SGLang's own store would listen on every interface."""

    def __init__(self, options: EngineOptions, engine: int, log_path: Path, *, has_accelerator: bool) -> None:
        port = free_port(options.host)
        command = launch.command(options, engine=engine, port=port)
        self._scratch = Scratch(log_path.parent, f"engine-{engine}")
        environment = arguments.environment(options, has_accelerator=has_accelerator) | {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._scratch.folder / 'ranks'}",
            "TMPDIR": str(self._scratch.folder),  # SGLang leaves the sockets that it makes there
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled()),
            "MASTER_ADDR": "127.0.0.1",  # with the port, the name of its shared memory
            "MASTER_PORT": str(port),
        }
        super().__init__(f"http://{Address(options.host, port)}", command, log_path, environment)

    async def start(self, *, seconds: float) -> None:
        self._scratch.make()
        try:
            await super().start(seconds=seconds)
        except HeadraceError:
            self._scratch.delete()
            raise

    async def wait(self) -> int:
        exit_code = await super().wait()
        self._scratch.delete()
        return exit_code

    async def stop(self, grace_seconds: float = 8.0) -> None:
        await super().stop(grace_seconds)
        self._scratch.delete()


def _compiled() -> str:
    """Compiled kernels outlive an engine, so they must not be in the engine's own temporary folder, torch's default."""
    return f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"


async def _answers(client: EngineClient) -> bool:
    try:
        await client.weights_name(seconds=2.0)
    except HeadraceError:
        return False
    return True


_EXTERNAL_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


class ExternalEngine(EngineProcess):
    """SGLang's server at an address. Its weights are whatever it was given before."""

    def __init__(self, address: Address, tensor_parallel_size: int) -> None:
        self.url = f"http://{address}"
        self._tensor_parallel_size = tensor_parallel_size
        self._left = asyncio.Event()

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers, which may be at once.

        Raises Unavailable (ENGINE_START_FAILED) when it does not in time, FailedPrecondition for another
        tensor-parallel size than the job's.
        """
        end, why = time.monotonic() + seconds, ""
        async with EngineClient(self.url) as client:
            while time.monotonic() < end:
                try:
                    self._require_size(await client.tensor_parallel_size(seconds=_ANSWER_SECONDS))
                    return await client.resume()  # a trainer that died in a publication may have left it paused
                except (Unavailable, BadAnswer, TimeoutError) as error:
                    why = str(error)
                await asyncio.sleep(_EXTERNAL_POLL_SECONDS)
        raise Unavailable(
            f"the engine at {self.url} did not answer within {seconds:g} s ({why}): start it with `python -m "
            "sglang.launch_server`, or take its address out of --rollout-external-engine-addrs",
            reason="ENGINE_START_FAILED",
        )

    @property
    def exit_code(self) -> int | None:
        """Unknown here: missed checks say that it is gone."""
        return None

    async def wait(self) -> int:
        """Returns 0 once it was left; its checks are what tells that it ended."""
        await self._left.wait()
        return 0

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends the requests that this service sent it, and leaves it running."""
        if self._left.is_set():
            return
        self._left.set()
        async with EngineClient(self.url) as client:
            try:
                await client.abort_all()
            except HeadraceError:
                return  # it is away, and its requests with it

    def last_lines(self) -> str:
        """Says where its log is not."""
        return f"{self.url} was started elsewhere, and its log is there"

    def _require_size(self, found: int) -> None:
        if found != self._tensor_parallel_size:
            raise FailedPrecondition(
                f"the engine at {self.url} has a tensor-parallel size of {found}, and rollout_num_gpus_per_engine is "
                f"{self._tensor_parallel_size}: start one of them with the other's number"
            )
