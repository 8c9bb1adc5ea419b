"""An engine's server: a child process, or one that somebody else starts. A fake may implement the protocol, too."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError, FailedPrecondition, HeadraceError, Unavailable
from headrace.process import linux
from headrace.process.child import Child
from headrace.process.exit_status import meaning
from headrace.process.log_file import last_words
from headrace.process.scratch import Scratch
from headrace.rpc.net import Address, free_port, resolved
from services.rollout.engine import arguments, launch
from services.rollout.engine.arguments import EngineOptions, NodeOptions
from services.rollout.engine.client import EngineClient
from services.rollout.engine.replies import BadAnswer

_POLL_SECONDS = 0.25
_STARTER_SECONDS = 5.0
"""srun ends what it has started on another machine when it is asked to, not when it is killed."""


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

    def __init__(
        self,
        url: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        least_grace_seconds: float = 0.0,
    ) -> None:
        """It is asked to end and has `least_grace_seconds` whoever ends it, also where its starter was killed."""
        self.url = url
        self._least_grace_seconds = least_grace_seconds
        self._child = Child(command, log_path, environment, asks_group=True, orphan_seconds=least_grace_seconds)

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers. Raises Unavailable with its last log lines when it does not."""
        await self._child.start()
        await self._answered(seconds)

    async def _answered(self, seconds: float) -> None:
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
        await self._child.stop(max(grace_seconds, self._least_grace_seconds))

    def memory_bytes(self) -> int | None:
        """Returns the memory of its process and those below it."""
        return linux.of_tree(self.pid) if self.exit_code is None else None

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


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One of an engine's machines: what starts a command there, and where machine 0 waits for the others."""

    rank: int
    meets_at: Address
    is_far: bool = False
    """The machines have an address in common, and no file."""
    ranks_file: Path | None = None
    """The file of machine 0 by which ranks of one machine meet; absent on machine 0."""
    starter: Sequence[str] = ()
    """Words before a command with which it runs on that machine; none for this one."""

    @property
    def is_follower(self) -> bool:
        """It serves no requests: machine 0 tells it what to do."""
        return self.rank > 0


class SglangProcess(ServerProcess):
    """A real engine, or what runs of it on one of its machines.

    Its ranks meet by a file where all are on this machine: SGLang's own store would listen on every interface.
    """

    def __init__(
        self,
        options: EngineOptions,
        engine: int,
        log_path: Path,
        *,
        has_accelerator: bool,
        node: EngineNode | None = None,
    ) -> None:
        port = free_port() if node and node.starter else free_port(options.host)
        told = None if node is None else NodeOptions(node.rank, str(node.meets_at))
        command = launch.command(options, engine=engine, port=port, node=told)
        self._is_follower = node is not None and node.is_follower
        self._scratch = Scratch(log_path.parent, log_path.stem)
        environment = arguments.environment(options, has_accelerator=has_accelerator) | {
            "TMPDIR": str(self._scratch.folder),  # SGLang leaves the sockets that it makes there
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled()),
            "MASTER_ADDR": "127.0.0.1",  # with the port, the name of its shared memory
            "MASTER_PORT": str(port),
        }
        self.ranks_file = (node and node.ranks_file) or self._scratch.folder / "ranks"
        if node is None or not node.is_far:
            environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{self.ranks_file}"
        else:  # it would look for the way to the internet, and without one tell the others 0.0.0.0
            environment["SGLANG_HOST_IP"] = str(resolved(Address(options.host, port))[0][4][0])
        starter = () if node is None else node.starter
        super().__init__(
            f"http://{Address(options.host, port)}",
            [*starter, *command],
            log_path,
            environment,
            least_grace_seconds=_STARTER_SECONDS if starter else 0.0,
        )

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers; on a machine that serves no requests, once it runs."""
        self._scratch.make()
        try:
            await super().start(seconds=seconds)
        except HeadraceError:
            self._scratch.delete()
            raise

    async def _answered(self, seconds: float) -> None:
        if not self._is_follower:
            await super()._answered(seconds)

    async def wait(self) -> int:
        exit_code = await super().wait()
        self._scratch.delete()
        return exit_code

    async def stop(self, grace_seconds: float = 8.0) -> None:
        await super().stop(grace_seconds)
        self._scratch.delete()


class NodesProcess(EngineProcess):
    """One engine on several machines, a process on each. The first serves; the end of any is the engine's end.

    built → all started → the first one answers → one has ended → the others are ended
    """

    def __init__(self, nodes: Sequence[EngineProcess]) -> None:
        self.nodes = nodes
        self._ended: EngineProcess | None = None
        """The one that ended first."""

    @property
    def url(self) -> str:  # type: ignore[override]
        """The address of the first."""
        return self.nodes[0].url

    async def start(self, *, seconds: float) -> None:
        """Returns when the first one answers. Raises Unavailable (ENGINE_START_FAILED) when one ended before."""
        first = asyncio.create_task(self.nodes[0].start(seconds=seconds))
        others = [asyncio.create_task(self._follows(number, seconds)) for number in range(1, len(self.nodes))]
        try:
            await asyncio.wait([first, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in (*others, first):  # the first one waits for the others, and says less about why
                if task.done():
                    task.result()
        except BaseException:
            await self.stop(0.0)
            raise
        finally:
            await _cancelled([first, *others])

    @property
    def exit_code(self) -> int | None:
        """That of a process that has ended; None while all run."""
        return next((node.exit_code for node in self.nodes if node.exit_code is not None), None)

    async def wait(self) -> int:
        """Returns the exit code of the process that ended first, once all have ended."""
        waits = {asyncio.create_task(node.wait()): node for node in self.nodes}
        try:
            ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            first = next(task for task in waits if task in ended)
            self._ended = self._ended or waits[first]
            await self.stop(0.0)
            return first.result()
        finally:
            await _cancelled(waits)

    async def stop(self, grace_seconds: float = 8.0) -> None:
        """Asks all at once: those behind the first end when it does."""
        await asyncio.gather(*(node.stop(grace_seconds) for node in self.nodes))

    def memory_bytes(self) -> int | None:
        """The memory of those processes that are on this machine."""
        sizes = [size for node in self.nodes if (size := node.memory_bytes()) is not None]
        return sum(sizes) if sizes else None

    @property
    def resident_bytes(self) -> int | None:
        return max((size for node in self.nodes if (size := node.resident_bytes) is not None), default=None)

    def last_lines(self) -> str:
        """The end of the log of the process that ended first; before, of each one's."""
        shown = self.nodes if self._ended is None else [self._ended]
        return "\n".join(f"on machine {self.nodes.index(node)}:\n{node.last_lines()}" for node in shown)

    async def _follows(self, number: int, seconds: float) -> None:
        node = self.nodes[number]
        await node.start(seconds=seconds)
        code = await node.wait()
        raise Unavailable(
            f"the engine's process on machine {number} ended with {meaning(code, node.resident_bytes)} while the "
            f"engine started; the end of its log:\n{node.last_lines()}",
            reason="ENGINE_START_FAILED",
        )


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def nodes_here(options: EngineOptions, engine: int, log_dir: Path, *, has_accelerator: bool) -> EngineProcess:
    """The processes of an engine, all of them on this machine: one, or as many as it has machines elsewhere."""
    log = log_dir / f"engine-{engine}.log"
    if options.shape.nodes == 1:
        return SglangProcess(options, engine, log, has_accelerator=has_accelerator)
    first = EngineNode(0, Address(options.host, free_port(options.host)))
    processes = [SglangProcess(options, engine, log, has_accelerator=has_accelerator, node=first)]
    for rank in range(1, options.shape.nodes):
        node = replace(first, rank=rank, ranks_file=processes[0].ranks_file)
        own = replace(options, first_gpu=options.first_gpu + rank * options.shape.devices_per_node)
        processes.append(SglangProcess(own, engine, node_log(log, rank), has_accelerator=has_accelerator, node=node))
    return NodesProcess(processes)


def node_log(log: Path, rank: int) -> Path:
    """engine-0.log is the log on machine 0, and engine-0.node-1.log that on machine 1."""
    return log.with_name(f"{log.stem}.node-{rank}.log") if rank else log


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

    def __init__(self, address: Address, num_ranks: int) -> None:
        self.url = f"http://{address}"
        self._num_ranks = num_ranks
        self._left = asyncio.Event()

    async def start(self, *, seconds: float) -> None:
        """Returns when it answers, which may be at once.

        Raises Unavailable (ENGINE_START_FAILED) when it does not in time, FailedPrecondition for another number of
        ranks than the job's.
        """
        end, why = time.monotonic() + seconds, ""
        async with EngineClient(self.url) as client:
            while time.monotonic() < end:
                try:
                    self._require_ranks(await client.num_ranks(seconds=_ANSWER_SECONDS))
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

    def _require_ranks(self, found: int) -> None:
        if found != self._num_ranks:
            raise FailedPrecondition(
                f"the engine at {self.url} has {found} ranks, and rollout_num_gpus_per_engine is {self._num_ranks}: "
                "start one of them with the other's number"
            )
