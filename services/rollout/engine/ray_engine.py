"""An engine on a machine of a Ray cluster: an actor there starts its process, waits for its end, and ends it.

built → placed (a machine has room for the actor) → started → ended: by itself, by `stop`, or with its machine
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.errors import ConfigError, HeadraceError, Unavailable
from headrace.process.guard import UNDER_RAY
from headrace.rpc.client import VARIABLES as TOKENS
from headrace.rpc.log import log
from headrace.rpc.net import Address, free_port
from services.rollout.engine.process import EngineNode, EngineProcess, NodesProcess

_ANSWER_SECONDS = 20.0
_PASSED_ON = ("HEADRACE_", "OMP_", "GOMP_", "PYTHON", "NCCL_", "TORCH", "GLOO_", "SGLANG_")

Make = Callable[[str], EngineProcess]
"""Makes the process on the machine with an address. It is pickled, for machines that have headrace as well."""


@dataclass(frozen=True, slots=True)
class Started:
    """The answer of an actor: an address, or the reason why there is none."""

    url: str
    refusal: str = ""
    is_config: bool = False


class EngineActor:
    """The actor, on the engine's machine."""

    def __init__(self) -> None:
        self._process: EngineProcess | None = None

    def free_address(self) -> Address:
        """A free port of its machine, at the address by which others reach it."""
        host = get_node_ip_address()
        return Address(host, free_port(host))

    async def start(self, make: Make, seconds: float) -> Started:
        """Makes the process and starts it."""
        self._process = make(get_node_ip_address())
        try:
            await self._process.start(seconds=seconds)
        except HeadraceError as error:  # pickled, it would lose its class
            return Started("", error.message, isinstance(error, ConfigError))
        return Started(self._process.url)

    async def wait(self) -> tuple[int, str]:
        """Returns the exit code and the end of the log, once the process has ended."""
        assert self._process is not None
        return await self._process.wait(), self._process.last_lines()

    async def stop(self, grace_seconds: float) -> None:
        if self._process is not None:
            await self._process.stop(grace_seconds)


class RayEngine(EngineProcess):
    """Needs a share of one machine: `num_gpus` GPUs where the cluster has some, else a CPU."""

    def __init__(self, make: Make | None, num_gpus: int) -> None:
        """`place` comes first where `make` is told later."""
        self.url = ""
        self.make = make
        self._share = {"num_gpus": num_gpus, "num_cpus": 0} if num_gpus else {"num_cpus": 1}
        self._actor: Any = None
        self._ending: asyncio.Task[tuple[int, str]] | None = None

    async def start(self, *, seconds: float) -> None:
        """Returns when the engine answers, on whichever machine has room for it.

        Raises Unavailable (ENGINE_START_FAILED) when it does not, or when no machine has room in time.
        """
        if self._actor is None:
            self.place("SPREAD")
        try:
            started = await asyncio.wait_for(self._actor.start.remote(self.make, seconds), seconds + _ANSWER_SECONDS)
        except TimeoutError as error:
            raise self._not_started(f"found no machine with room for {self._share} within {seconds:g} s") from error
        except ray.exceptions.RayError as error:
            raise self._not_started(f"lost its machine: {error}") from error
        if started.is_config:
            raise ConfigError(started.refusal)
        if started.refusal:
            raise Unavailable(started.refusal, reason="ENGINE_START_FAILED")
        self.url = started.url
        self._ending = asyncio.create_task(self._ended())

    def place(self, strategy: Any) -> None:
        """Asks Ray for a machine by one of its scheduling strategies."""
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_PASSED_ON) and name not in TOKENS  # Ray's dashboard shows them, and engines need none
        }
        environment = {"env_vars": passed_on | UNDER_RAY}
        options = {**self._share, "scheduling_strategy": strategy, "runtime_env": environment}
        self._actor = ray.remote(EngineActor).options(**options).remote()

    async def free_address(self, *, seconds: float) -> Address:
        """An address of its machine at which nobody listens. Raises Unavailable when no machine has room in time."""
        try:
            return await asyncio.wait_for(self._actor.free_address.remote(), seconds)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise self._not_started(f"found no machines with {self._share} each within {seconds:g} s") from error

    @property
    def exit_code(self) -> int | None:
        """None while it runs, as far as is known here."""
        return self._ending.result()[0] if self._ending and self._ending.done() else None

    async def wait(self) -> int:
        """Returns the exit code once the process has ended; that of SIGKILL where its machine was lost."""
        assert self._ending is not None, "it was not started"
        return (await asyncio.shield(self._ending))[0]

    async def stop(self, grace_seconds: float = 8.0) -> None:
        """Ends the process and everything that it started, and frees its share of the machine."""
        if self._actor is None:
            return
        try:
            await asyncio.wait_for(self._actor.stop.remote(grace_seconds), grace_seconds + _ANSWER_SECONDS)
        except (TimeoutError, ray.exceptions.RayError) as error:  # its processes end with the actor
            log.warning("engine_not_stopped_by_its_actor", error=f"{type(error).__name__}: {error}")
        ray.kill(self._actor)

    def last_lines(self) -> str:
        """Returns the end of its log, once it has ended."""
        return self._ending.result()[1] if self._ending and self._ending.done() else "(its log is on its machine)"

    async def _ended(self) -> tuple[int, str]:
        try:
            code, lines = await self._actor.wait.remote()
        except ray.exceptions.RayError as error:
            return 128 + signal.SIGKILL, f"its actor or its machine was lost: {error}"
        return code, lines

    def _not_started(self, what: str) -> Unavailable:
        return Unavailable(
            f"the engine {what}; Ray has {ray.available_resources()}: see `ray status`", reason="ENGINE_START_FAILED"
        )


class RayNodes(NodesProcess):
    """One engine on several machines of the cluster, each with its bundle of a placement group."""

    def __init__(self, make: Callable[[EngineNode], Make], num_nodes: int, num_gpus: int) -> None:
        self._engines = [RayEngine(None, num_gpus) for _ in range(num_nodes)]
        self._bundle = {"GPU": num_gpus} if num_gpus else {"CPU": 1}
        self._make_node = make
        self._group: Any = None
        super().__init__(self._engines)

    async def start(self, *, seconds: float) -> None:
        """Returns when the engine answers, on machines that all have room for it.

        Raises Unavailable (ENGINE_START_FAILED) when it does not, or when there are none in time.
        """
        self._group = placement_group([self._bundle] * len(self._engines), strategy="STRICT_SPREAD")
        for rank, engine in enumerate(self._engines):
            engine.place(PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank))
        try:
            meets_at = await self._engines[0].free_address(seconds=seconds)
        except Unavailable:
            await self.stop(0.0)
            raise
        for rank, engine in enumerate(self._engines):
            engine.make = self._make_node(EngineNode(rank, meets_at, is_far=True))
        await super().start(seconds=seconds)

    async def stop(self, grace_seconds: float = 8.0) -> None:
        """Ends the processes, and frees the machines' shares."""
        await super().stop(grace_seconds)
        if self._group is not None:
            remove_placement_group(self._group)


def join_cluster() -> bool:
    """Connects this process to the cluster of RAY_ADDRESS. Returns True where it has GPUs.

    Raises Unavailable when there is none.
    """
    address = os.environ["RAY_ADDRESS"]
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Unavailable(f"no Ray cluster answers at RAY_ADDRESS {address}: {error}") from error
    return bool(ray.cluster_resources().get("GPU"))
