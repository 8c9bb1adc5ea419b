"""Agents that are played elsewhere: processes on any machine lease tasks, play them, and report the results.

consumes: tasks, and calls of hosts; waits for: a task for a host, a call for a task; unblocked by: each other. `_watch`
ends leases whose hosts were not heard of. What a host said in a lease that has ended counts for nothing: its requests
are cancelled, later ones are refused, and the next host begins with an empty record. Nothing is durable: with the
service its tasks end, and the ledger's leases bring their prompts again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import Aborted, FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.hooks import HookArgs
from headrace.hooks.agent import Task
from headrace.hooks.reward import Reward, checked_reward
from headrace.job.schema.run import without_secrets
from headrace.limits import (
    MAX_ANSWER_BYTES,
    MAX_TASK_WAIT_SECONDS,
    MAX_TASKS_PER_CALL,
    cut_text,
    require_finite,
    require_id,
    require_json_object,
    require_name,
    require_path,
)
from headrace.prompts import label_mark, label_text, ordered_json, set_content
from headrace.rpc.log import kept_running, log
from services.rollout.agents.sampler import Played
from services.rollout.agents.session import Session

MAX_LOSSES = 3
"""A task that this number of hosts took and did not finish has failed: it may be what ends them."""
_TASK_BYTES = 4_096
"""The bytes of a task on the wire beside its prompt and metadata."""
_WARN_SECONDS = 10.0
_GRACE_SECONDS = 5.0
"""A host ends a task at its limit by itself, and then says so."""


@dataclass(eq=False, slots=True)
class HostTask:
    """A task that hosts may play: waiting → lent → done."""

    task: Task
    session: Session
    sample_id: str
    path: str
    """The function of the host that has it, else the job's."""
    played: asyncio.Future[Played]
    seconds: float
    """How long one host may play it."""
    since: float
    """When it was offered."""
    losses: list[str] = field(default_factory=list)
    """The hosts that lost it."""
    lease_id: str | None = None
    host_id: str = ""
    """With the times that follow, of the latest lease."""
    began: float = 0.0
    renewed: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Its size on the wire, about."""
        return len(str(self.task.prompt)) + len(str(self.task.metadata)) + _TASK_BYTES

    @property
    def is_hopeless(self) -> bool:
        return len(self.losses) >= MAX_LOSSES

    def resolve(self, result: Reward | HeadraceError | None) -> bool:
        """Ends it with a reward or a failure. False where it had ended."""
        if self.played.done():
            return False
        if isinstance(result, HeadraceError):
            self.played.set_exception(result)
        else:
            self.played.set_result(Played(result, self.path))
        return True


class TaskLeases:
    """The table of which host plays which task. `now` is in seconds of any clock that does not go back.

    A lease that is not renewed ends, and its task waits again, in front.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.waiting: OrderedDict[HostTask, None] = OrderedDict()
        self._lent: dict[str, HostTask] = {}

    def offer(self, task: HostTask) -> None:
        """The task waits behind all others."""
        self.waiting[task] = None

    def withdraw(self, task: HostTask) -> None:
        """Nobody wants the task any more; does nothing for one that is done."""
        self.waiting.pop(task, None)
        if task.lease_id is not None:
            self.finish(task.lease_id)

    def lend(self, host_id: str, most: int, most_bytes: int, now: float) -> list[HostTask]:
        """Lends at most `most` tasks; one that is larger than all of `most_bytes` comes alone."""
        lent, left = list[HostTask](), most_bytes
        while self.waiting and len(lent) < most and (not lent or next(iter(self.waiting)).num_bytes <= left):
            task, _ = self.waiting.popitem(last=False)
            left -= task.num_bytes
            task.lease_id, task.host_id, task.began, task.renewed = secrets.token_urlsafe(12), host_id, now, now
            self._lent[task.lease_id] = task
            lent.append(task)
        return lent

    def renew(self, lease_ids: Sequence[str], now: float) -> list[str]:
        """Returns those that have ended."""
        for lease_id in lease_ids:
            with suppress(KeyError):
                self._lent[lease_id].renewed = now
        return [lease_id for lease_id in lease_ids if lease_id not in self._lent]

    def finish(self, lease_id: str) -> HostTask | None:
        """Ends the lease and returns its task, which is the caller's; None where it had ended."""
        task = self._lent.pop(lease_id, None)
        if task:
            task.lease_id = None
        return task

    def give_back(self, lease_id: str) -> HostTask | None:
        """The task waits again, in front of all others; None where the lease had ended."""
        task = self.finish(lease_id)
        if task:
            self.waiting[task] = None
            self.waiting.move_to_end(task, last=False)
        return task

    def lost(self, now: float) -> Iterator[HostTask]:
        """Ends leases that were not renewed; their tasks wait again, but for those that were lost too often."""
        for lease_id, task in list(self._lent.items()):
            if now - task.renewed > self.lease_seconds:
                task.losses.append(task.host_id)
                (self.finish if task.is_hopeless else self.give_back)(lease_id)
                yield task

    def overdue(self, now: float) -> Iterator[HostTask]:
        """Ends leases of tasks that were played longer than they may be."""
        for lease_id, task in list(self._lent.items()):
            if now - task.began > task.seconds:
                self.finish(lease_id)
                yield task


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
        self._path = path
        self._args = args
        self._url = url
        self._seconds = seconds
        self._patience_seconds = patience_seconds
        self._warn: Callable[[str], None] | None = warn
        self._ended = ended
        self._leases = TaskLeases(lease_seconds)
        self._heard = time.monotonic()
        self._asking = 0
        self._offered = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Hosts load the agent themselves."""
        self._heard = time.monotonic()
        self._watching = asyncio.create_task(kept_running("watch agent hosts", self._watch, self._ended))

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        """Raises Aborted where the agent failed or its hosts were lost, Unavailable where there is no host."""
        played: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        offered = HostTask(task, session, sample_id, self._path, played, self._seconds, time.monotonic())
        self._leases.offer(offered)
        self._offered.set()
        try:
            return await played
        finally:
            self._leases.withdraw(offered)

    async def close(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # What hosts call

    async def lease(self, request: pb.LeaseTasksRequest) -> pb.LeaseTasksResponse:
        """Returns tasks for the host, which plays a function of its own or the job's; none where the wait was over.

        A busy host asks for none: its call ends with the wait, or with the service. Raises InvalidArgument for a host
        without a name, or a wait that is no number.
        """
        host_id = require_id(request.host_id, "host_id")
        most = min(request.max_tasks, MAX_TASKS_PER_CALL)
        wait_seconds = min(require_finite(request.wait_seconds, "wait_seconds"), MAX_TASK_WAIT_SECONDS)
        path = request.agent_function_path and require_path(request.agent_function_path, "agent_function_path")
        self._asking += most > 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._wait_for_tasks(most)
            lent = self._leases.lend(host_id, most, MAX_ANSWER_BYTES, time.monotonic())
        finally:
            self._asking -= most > 0
            self._heard = time.monotonic()
        for task in lent:
            task.path = path or self._path
            task.session.lend(task.lease_id)
        return pb.LeaseTasksResponse(
            tasks=[self._on_wire(task) for task in lent],
            lease_seconds=self._leases.lease_seconds,
            agent_function_path=self._path,
            args_json=ordered_json(without_secrets(_plain(dict(self._args)))) if request.return_args else "",
        )

    def renew(self, request: pb.RenewTasksRequest) -> pb.RenewTasksResponse:
        """Returns the leases that have ended."""
        self._heard = time.monotonic()
        return pb.RenewTasksResponse(lost_lease_ids=self._leases.renew(request.lease_ids, self._heard))

    def finish(self, request: pb.FinishTaskRequest) -> pb.FinishTaskResponse:
        """Ends a task, or gives it to another host. Raises InvalidArgument for a reward that is none."""
        lease_id, result = require_id(request.lease_id, "lease_id"), _result_of(request)
        self._heard = time.monotonic()
        if request.WhichOneof("result") == "returned":
            task = self._leases.give_back(lease_id)
            if task:
                task.session.lend(None)
                self._offered.set()
            return pb.FinishTaskResponse(accepted=task is not None)
        task = self._leases.finish(lease_id)
        return pb.FinishTaskResponse(accepted=task is not None and task.resolve(result))

    async def _wait_for_tasks(self, most: int) -> None:
        while not (most and self._leases.waiting):
            self._offered.clear()
            await self._offered.wait()

    def _on_wire(self, lent: HostTask) -> pb.AgentTask:
        task = lent.task
        made = pb.AgentTask(
            lease_id=str(lent.lease_id),
            base_url=f"{self._url}/sessions/{lent.session.session_id}.{lent.lease_id}/v1",
            label=label_text(task.label),
            label_is_json=bool(label_mark(task.label)),
            metadata_json=ordered_json(task.metadata) if task.metadata else "",
            index=task.index,
            evaluation=task.evaluation,
            seconds=lent.seconds,
            sample_id=lent.sample_id,
        )
        set_content(made, task.prompt)
        return made

    # What becomes of hosts that are not heard of

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._leases.lease_seconds / 4))
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        for task in self._leases.overdue(now - _GRACE_SECONDS):
            message = f"agent {task.path} took longer than {task.seconds:g} s on host {task.host_id}"
            task.resolve(Aborted(message, reason="HOOK_TIMEOUT"))
        for task in self._leases.lost(now):
            log.warning("agent_host_lost", host_id=task.host_id, sample_id=task.sample_id, losses=len(task.losses))
            task.session.lend(None)
            self._offered.set()
            if task.is_hopeless:
                message = f"{len(task.losses)} agent hosts were not heard of again while they played it: {task.losses}"
                task.resolve(Aborted(message, reason="HOOK_CRASHED"))
        if self._leases.waiting and not self._asking:
            self._look_for_hosts(now)

    def _look_for_hosts(self, now: float) -> None:
        start_one = "start one with headrace agent --rollout-address HOST:PORT"
        first = next(iter(self._leases.waiting))
        if self._warn and now - max(self._heard, first.since) > _WARN_SECONDS:
            self._warn(f"no agent host asks for tasks: {start_one}")
            self._warn = None
        for task in list(self._leases.waiting):
            if now - max(self._heard, task.since) > self._patience_seconds:
                self._leases.withdraw(task)
                message = f"no agent host has asked for tasks for {self._patience_seconds:g} s: {start_one}"
                task.resolve(Unavailable(message))


def require_hosts(hosts: AgentHosts | None) -> AgentHosts:
    """Raises FailedPrecondition where the job's agents are played by the service itself, or it has none."""
    if hosts is None:
        raise FailedPrecondition(
            "this job lends no tasks: start its rollout service with --agent-hosts --agent-function-path FILE.py:FN"
        )
    return hosts


def _result_of(request: pb.FinishTaskRequest) -> Reward | HeadraceError | None:
    match request.WhichOneof("result"):
        case "failure":
            reason = require_name(request.failure.reason, "failure.reason")
            return Aborted(cut_text(request.failure.message) or reason, reason=reason)
        case "reward":
            return _reward(request.reward, "reward")
        case "reward_parts_json":
            return _reward(require_json_object(request.reward_parts_json, "reward_parts_json"), "reward_parts_json")
    return None


def _reward(value: object, field: str) -> Reward:
    reward = checked_reward("of the host", value)
    if isinstance(reward, str):
        raise InvalidArgument(f"{field}: {reward}", field=field)
    return reward


def _plain(value: object) -> object:
    """Options as JSON has them: a path is a text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
