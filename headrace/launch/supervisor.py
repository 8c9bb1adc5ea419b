"""Keeps services alive.

A service: started → healthy → (ends) → waits its backoff → started again at the same address, at most `max_restarts`
times within `window_seconds`. One that ends with exit code 2 has a mistake in it and fails the run at once. So does one
that ends before it was ever healthy, unless it is a trainer with --use-fault-tolerance; and so does a trainer that has
nothing to learn from, and then its own last words are the reason.
One that ends with PEER_AWAY has waited for another service without success. Such an end does not count as a restart,
unless they go on for `max_away_seconds` in a row; its last error names the other service and its address.
The one that is named `until` ends the run with exit code 0. A restart that a person asked for (`headrace restart`)
waits for no backoff and does not count.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.errors import HeadraceError, NothingToLearn, Unavailable
from headrace.launch.health import is_serving
from headrace.launch.process import GRACE_SECONDS, ServiceProcess, ServiceSpec
from headrace.process.exit_status import NOT_WORTH_RESTARTING, NOTHING_TO_LEARN, PEER_AWAY
from headrace.rpc.net import listener, require_free

_ASK_AGAIN_SECONDS = 0.25
_WORTH_SAYING_SECONDS = 2.0
_ANOTHER_ABSENCE_SECONDS = 1800.0
"""A service that ran for longer had its peers meanwhile."""


class ServiceFailed(HeadraceError):
    """A service could not be started or kept alive; the message has the last lines of its log."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits and pauses of restarts."""

    max_restarts: int = 5
    window_seconds: float = 600.0
    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 15.0
    max_away_seconds: float = 3600.0
    """How long a service may end again and again because another one, or the database, does not answer."""

    progress_seconds: float = 15.0
    """How often a person hears of a service that is not ready yet."""

    def backoff_seconds(self, restarts: int) -> float:
        """The pause before the restart after `restarts` recent ones."""
        return min(self.first_backoff_seconds * 2.0**restarts, self.longest_backoff_seconds)


class Supervisor:
    """Runs services until the last of them finishes. `tell` gets one line for a person about each event."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        until: str | None,
        tell: Callable[[str], None],
        policy: RestartPolicy,
        changed: Callable[[dict[str, int]], None],
        grace: Callable[[], float] = lambda: GRACE_SECONDS,
        ready: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._specs = specs
        self._until = until
        self._tell = tell
        self._policy = policy
        self._changed = changed
        self._grace = grace
        self._ready = ready
        self._running: dict[str, ServiceProcess] = {}
        self._started_at = {spec.name: deque[float]() for spec in specs}
        self._away: dict[str, tuple[float, float]] = {}
        """When a service ended for want of another one: the first time in a row, and the last."""

    async def run(self) -> None:
        """Returns when `until` has finished. Raises ServiceFailed and NothingToLearn.

        All services are ended when it returns, raises or is cancelled.
        """
        tasks = [asyncio.create_task(self._keep(spec), name=spec.name) for spec in self._specs]
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    tasks.remove(task)
                    if task.get_name() == self._until:
                        return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()

    async def _keep(self, spec: ServiceSpec) -> None:
        with _listening(spec) as held:
            await self._keep_with(spec, held)

    async def _keep_with(self, spec: ServiceSpec, held: socket.socket | None) -> None:
        ever_healthy = False
        while True:
            code, healthy, asked_for = await self._run_once(spec, held)
            ever_healthy = ever_healthy or healthy
            process = self._running[spec.name]
            ended = f"{spec.name} ended with {process.ended_with(code)}"
            if asked_for and code not in (NOTHING_TO_LEARN, NOT_WORTH_RESTARTING):
                self._started_at[spec.name].pop()
                continue
            if code == 0 and spec.name == self._until:
                return
            if code == NOTHING_TO_LEARN:
                raise NothingToLearn(
                    f"{process.last_words}\n"
                    "correct that and repeat the command: it continues from the last checkpoint, and "
                    "`headrace buffer retry` queues the failed prompts again"
                )
            if code == NOT_WORTH_RESTARTING or not (ever_healthy or spec.restarts_before_ready):
                raise ServiceFailed(f"{ended}{'' if ever_healthy else ' before it was ready'}; {process.why}")
            if code == PEER_AWAY:
                await self._until_peers_may_be_back(spec)
                continue
            if spec.no_restart is not None:
                raise ServiceFailed(f"{ended}: {spec.no_restart}; {process.why}")
            await self._before_restart(spec, code)

    async def _run_once(self, spec: ServiceSpec, held: socket.socket | None) -> tuple[int, bool, bool]:
        """Starts the service and waits for its end.

        Returns its exit code, whether it became healthy, and whether a person asked for its end.
        """
        if spec.serves:
            _require_free(spec)
        spec.take_restart_request()  # of a process that is no more
        self._started_at[spec.name].append(time.monotonic())
        process = ServiceProcess(spec, held)
        await process.start()
        self._running[spec.name] = process
        self._changed({name: each.pid for name, each in self._running.items()})
        healthy = await self._healthy(process)
        if healthy:
            self._ready(spec.name)
        asked_for = await self._ended_on_request(process)
        return await process.wait(), healthy, asked_for

    async def _ended_on_request(self, process: ServiceProcess) -> bool:
        """Returns when the process has ended; True where somebody asked for a restart, which ends it here."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                if process.spec.take_restart_request():
                    self._tell(f"{process.spec.name} is restarted, as somebody asked")
                    await process.stop(self._grace())
                    return True
                await asyncio.wait({ended}, timeout=_ASK_AGAIN_SECONDS)
        finally:
            ended.cancel()
        return False

    async def _healthy(self, process: ServiceProcess) -> bool:
        """True once it serves, False when it ends first. Raises ServiceFailed when it takes too long."""
        started = said = time.monotonic()
        while process.exit_code is None:
            if await is_serving(process.spec.asked_at):
                self._tell(f"{process.spec.name} ready after {time.monotonic() - started:.0f} s")
                return True
            if time.monotonic() - started > process.spec.start_seconds:
                raise ServiceFailed(
                    f"{process.spec.name} does not serve after {process.spec.start_seconds:.0f} s "
                    f"(--start-timeout-seconds); {process.why}"
                )
            if time.monotonic() - said > self._policy.progress_seconds:
                said = time.monotonic()
                self._tell(f"{process.spec.name} is starting, {said - started:.0f} s so far{process.doing}")
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        return False

    async def _until_peers_may_be_back(self, spec: ServiceSpec) -> None:
        """Pauses without counting the start. Raises ServiceFailed when the other service has been away for too long."""
        self._started_at[spec.name].pop()
        now = time.monotonic()
        since, last = self._away.get(spec.name, (now, now))
        since = now if now - last > _ANOTHER_ABSENCE_SECONDS else since
        self._away[spec.name] = (since, now)
        if now - since > self._policy.max_away_seconds:
            raise ServiceFailed(
                f"{spec.name} has waited without success for another service for {now - since:.0f} s; "
                f"{self._running[spec.name].why}"
            )
        pause = self._policy.longest_backoff_seconds
        self._tell(
            f"{spec.name} ended because a service that it needs did not answer{self._reason(spec)}: it starts again in "
            f"{pause:g} s"
        )
        await asyncio.sleep(pause)

    async def _before_restart(self, spec: ServiceSpec, code: int) -> None:
        started_at = self._started_at[spec.name]
        ended = self._running[spec.name].ended_with(code)
        while started_at and time.monotonic() - started_at[0] > self._policy.window_seconds:
            started_at.popleft()
        restarts = len(started_at)
        if restarts > (self._policy.max_restarts if spec.max_restarts is None else spec.max_restarts):
            raise ServiceFailed(
                f"{spec.name} ended {restarts} times in {self._policy.window_seconds:.0f} s, last with "
                f"{ended}; {self._running[spec.name].why}"
            )
        pause = self._policy.backoff_seconds(max(restarts - 1, 0))
        self._tell(f"{spec.name} ended with {ended}{self._reason(spec)}: restart {restarts} in {pause:g} s")
        await asyncio.sleep(pause)

    def _reason(self, spec: ServiceSpec) -> str:
        said = self._running[spec.name].last_error
        return f" ({said.splitlines()[0]})" if said else ""

    async def _stop_all(self) -> None:
        """Stops the trainer first and the buffer last, so that no service loses the one that it talks to."""
        for spec in reversed(self._specs):
            process = self._running.get(spec.name)
            if process is not None and process.exit_code is None:
                asked = time.monotonic()
                await process.stop(self._grace())
                if (took := time.monotonic() - asked) > _WORTH_SAYING_SECONDS:
                    self._tell(f"{spec.name} stopped after {took:.0f} s")


@contextmanager
def _listening(spec: ServiceSpec) -> Iterator[socket.socket | None]:
    """The port that is held for the service. Raises ServiceFailed where somebody else has it."""
    if spec.held is None:
        yield None
        return
    try:
        held = listener(spec.held)
    except OSError as error:
        raise ServiceFailed(
            f"{spec.name} cannot be started: {spec.held}: {error.strerror or error}: choose another --openai-port, or "
            "leave it out for any free one"
        ) from error
    with held:
        yield held


def _require_free(spec: ServiceSpec) -> None:
    try:
        require_free(spec.listens_at)
    except Unavailable as error:
        raise ServiceFailed(
            f"{spec.name} cannot be started: {spec.listens_at} is taken: end the process that listens there, or choose "
            "another address"
        ) from error
