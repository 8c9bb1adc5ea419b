"""Agents that are played elsewhere: processes on any machine lease tasks, play them, and say what came of them.

consumes: tasks, and calls of hosts; waits for: a task for a host, a call for a task; unblocked by: each other. `_watch`
ends leases whose hosts were not heard of. What a host said in a lease that has ended counts for nothing: its requests
are cancelled, later ones are refused, and the next host begins with an empty record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import Aborted, HeadraceError, Unavailable
from headrace.hooks import HookArgs
from headrace.hooks.agent import Task
from headrace.hooks.reward import Reward
from headrace.limits import MAX_ANSWER_BYTES
from headrace.rpc.log import kept_running, log
from services.rollout.agents.lending import TaskLease, TaskLeases, TaskOffer
from services.rollout.agents.players import Played
from services.rollout.agents.session import Session

_TASK_BYTES = 4_096
"""The bytes of a task on the wire beside its prompt and metadata."""
_WARN_SECONDS = 10.0
_GRACE_SECONDS = 5.0
"""A host ends a task at its limit by itself, and then says so."""


@dataclass(eq=False, slots=True)
class SessionOffer(TaskOffer):
    """A task of a session, and what comes of it."""

    task: Task = field(kw_only=True)
    session: Session = field(kw_only=True)
    sample_id: str = field(kw_only=True)
    played: asyncio.Future[Played] = field(kw_only=True)
    path: str = field(kw_only=True)
    """The function of the host that has it, else the job's."""


@dataclass(frozen=True, slots=True)
class LentTask:
    """A task as a host is given it."""

    lease_id: str
    base_url: str
    seconds: float
    task: Task
    sample_id: str


class AgentHosts:
    """A `Player` whose tasks are played by agent hosts."""

    def __init__(
        self,
        path: str,
        args: HookArgs,
        url: str,
        *,
        seconds: float,
        lease_seconds: float,
        patience_seconds: float,
        warn: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        """`patience_seconds`: a task fails when no host was heard of for so long. `ended`: of background work."""
        self.path = path
        self.args = args
        self._url = url
        self._seconds = seconds
        self._patience_seconds = patience_seconds
        self._warn: Callable[[str], None] | None = warn
        self._ended = ended
        self._lending = TaskLeases(lease_seconds)
        self._heard = time.monotonic()
        self._asking = 0
        self._offered = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def lease_seconds(self) -> float:
        return self._lending.lease_seconds

    async def start(self) -> None:
        """Hosts load the agent themselves."""
        self._heard = time.monotonic()
        self._watching = asyncio.create_task(kept_running("watch agent hosts", self._watch, self._ended))

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        """Raises Aborted where the agent failed or its hosts were lost, Unavailable where there is no host."""
        size = len(str(task.prompt)) + len(str(task.metadata)) + _TASK_BYTES
        played = asyncio.get_running_loop().create_future()
        offer = SessionOffer(
            self._seconds,
            size,
            time.monotonic(),
            task=task,
            session=session,
            sample_id=sample_id,
            played=played,
            path=self.path,
        )
        self._lending.offer(offer)
        self._offered.set()
        try:
            return await offer.played
        finally:
            self._lending.withdraw(offer)

    async def close(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # What hosts call

    async def lend(self, host_id: str, most: int, wait_seconds: float, path: str) -> list[LentTask]:
        """Returns tasks for the host, which plays `path`; none where the wait was over first.

        A busy host asks for none: its call ends with the wait, or with the service.
        """
        deadline = time.monotonic() + wait_seconds
        self._asking += most > 0
        try:
            while not (most and self._lending.waiting) and (left := deadline - time.monotonic()) > 0:
                self._offered.clear()
                try:
                    async with asyncio.timeout(left):
                        await self._offered.wait()
                except TimeoutError:
                    break
            now = time.monotonic()
            return [self._lent(lease, path) for lease in self._lending.lend(host_id, most, MAX_ANSWER_BYTES, now)]
        finally:
            self._asking -= most > 0
            self._heard = time.monotonic()

    def renew(self, lease_ids: Sequence[str]) -> list[str]:
        """Returns the leases that have ended."""
        self._heard = time.monotonic()
        return self._lending.renew(lease_ids, self._heard)

    def finish(self, lease_id: str, result: Reward | HeadraceError | None) -> bool:
        """Ends a task with its reward or its failure. False where the lease had ended."""
        self._heard = time.monotonic()
        return self._resolve(self._lending.finish(lease_id), result)

    def give_back(self, lease_id: str) -> bool:
        """Another host is to play the task. False where the lease had ended."""
        self._heard = time.monotonic()
        offer = self._lending.give_back(lease_id)
        if isinstance(offer, SessionOffer):
            offer.session.lend(None)
            self._offered.set()
        return offer is not None

    def _lent(self, lease: TaskLease, path: str) -> LentTask:
        offer = lease.offer
        assert isinstance(offer, SessionOffer)
        offer.path = path
        offer.session.lend(lease.lease_id)
        url = f"{self._url}/sessions/{offer.session.session_id}.{lease.lease_id}/v1"
        return LentTask(lease.lease_id, url, offer.seconds, offer.task, offer.sample_id)

    # What becomes of hosts that are not heard of

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._lending.lease_seconds / 4))
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for lease in self._lending.overdue(now - _GRACE_SECONDS):
            assert isinstance(lease.offer, SessionOffer)
            message = f"agent {lease.offer.path} took longer than {lease.offer.seconds:g} s on host {lease.host_id}"
            self._resolve(lease.offer, Aborted(message, reason="HOOK_TIMEOUT"))
        for lease in self._lending.lost(now):
            self._lost(lease)
        if self._lending.waiting and not self._asking:
            self._look_for_hosts(now)

    def _lost(self, lease: TaskLease) -> None:
        offer = lease.offer
        assert isinstance(offer, SessionOffer)
        log.warning("agent_host_lost", host_id=lease.host_id, sample_id=offer.sample_id, losses=len(offer.losses))
        offer.session.lend(None)
        self._offered.set()
        if self._lending.is_hopeless(offer):
            message = f"{len(offer.losses)} agent hosts were not heard of again while they played it: {offer.losses}"
            self._resolve(offer, Aborted(message, reason="HOOK_CRASHED"))

    def _look_for_hosts(self, now: float) -> None:
        first = next(iter(self._lending.waiting))
        if self._warn and now - max(self._heard, first.since) > _WARN_SECONDS:
            self._warn("no agent host asks for tasks: start one with headrace agent --rollout-address HOST:PORT")
            self._warn = None
        for offer in list(self._lending.waiting):
            if now - max(self._heard, offer.since) > self._patience_seconds:
                self._lending.withdraw(offer)
                self._resolve(
                    offer,
                    Unavailable(
                        f"no agent host has asked for tasks for {self._patience_seconds:g} s: "
                        "start one with headrace agent --rollout-address HOST:PORT"
                    ),
                )

    @staticmethod
    def _resolve(offer: TaskOffer | None, result: Reward | HeadraceError | None) -> bool:
        if not isinstance(offer, SessionOffer) or offer.played.done():
            return False
        if isinstance(result, HeadraceError):
            offer.played.set_exception(result)
        else:
            offer.played.set_result(Played(result, offer.path))
        return True
