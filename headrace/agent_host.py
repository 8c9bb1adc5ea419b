"""Leases tasks, plays them in worker processes, and says what came of them.

consumes: tasks of the rollout service; waits for: a free slot, then a task; unblocked by: the end of a task, in any
way. A lease is renewed while its task is played; one that has ended stops its task. A host that is stopped returns its
tasks; one that is killed says nothing, and its leases run out. A host ends with its service.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError, DeadlineExceeded, HeadraceError, Unavailable
from headrace.hooks.agent import Task, require_agent, run_agent
from headrace.hooks.args import HookArgs
from headrace.hooks.failure import call_failure
from headrace.hooks.slime_names import SLIME_IMPORTS
from headrace.limits import from_json
from headrace.process.workers import WorkerError, WorkerPool
from headrace.prompts import LABEL_IS_JSON, label_for_hooks
from headrace.rpc.log import log

_LOAD_SECONDS = 120.0
_WAIT_SECONDS = 20.0
_ANSWER_SECONDS = 10.0
_RETURN_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""How often a service is asked that is away."""
_RESTART_SECONDS = 30.0
"""A service that ends and is not started again within this time has ended for good."""
_SERVER_ENDS = "SERVER_ENDS"
_RENEWALS_A_LEASE = 4


@dataclass(frozen=True, slots=True)
class _Absence:
    """Since when the service does not answer, and whether it had said that it ends."""

    since: float
    said_goodbye: bool

    def said(self, patience_seconds: float) -> str:
        what = "ends" if self.said_goodbye else "cannot be reached"
        return f"the rollout service {what}: this host waits {patience_seconds:g} s for it to be back, then ends"


class _ServiceEnded(Exception):
    """There will be no more tasks."""


class AgentHost:
    """States: built → running → ended."""

    def __init__(
        self,
        rollout: RolloutClient,
        path: str | None,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        concurrency: int,
        workers: int,
        patience_seconds: float,
        tell: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`path`: the agent; None for the one that the job names. `options` come before those of the job.

        `patience_seconds`: for a service that is away.

        `is_over` is asked while the service is away: True where it will not come back.
        """
        self._rollout = rollout
        self._path = path
        self._options = options
        self._concurrency = concurrency
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._host_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._pool = WorkerPool(workers, calls_per_worker=-(-concurrency // workers))
        self._args = HookArgs({})
        self._lease_seconds = 0.0
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._is_over = is_over
        self._absence: _Absence | None = None
        self.num_played = 0

    async def run(self) -> bool:
        """Plays until it is cancelled, or until the service has ended: then it returns True.

        Raises FailedPrecondition where the job lends no tasks, ConfigError when the agent cannot be loaded, and
        Unavailable when the service could not be reached for too long.
        """
        working: set[asyncio.Task[None]] = set()
        try:
            path = await self._prepare()
            working = {asyncio.create_task(self._renew()), asyncio.create_task(self._lease(path))}
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except _ServiceEnded:
            return True
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await self._close()
        return True

    async def _prepare(self) -> str:
        job = await self._patiently(0, 0.0, return_args=True)
        self._args, self._lease_seconds = (
            HookArgs({**json.loads(job.args_json or "{}"), **self._options}),
            job.lease_seconds,
        )
        path = self._path or job.agent_function_path
        if self._args.get("slime_imports"):
            os.environ[SLIME_IMPORTS] = "true"  # for the processes that play
        try:
            await self._pool.run(require_agent, path, timeout_seconds=_LOAD_SECONDS, name=f"agent {path}")
        except WorkerError as error:
            raise ConfigError(error.message, field="agent_function_path") from error
        self._tell(f"agent host {self._host_id} plays {path}, {self._concurrency} tasks at once")
        return path

    async def _lease(self, path: str) -> None:
        """One call always waits at the service, also while all slots are taken: its end is heard of at once."""
        while True:
            self._ended.clear()
            free = self._concurrency - len(self._playing)
            asking = asyncio.create_task(self._patiently(free, _WAIT_SECONDS, agent_function_path=path))
            ended = asyncio.create_task(self._ended.wait())
            try:
                await asyncio.wait({asking} if free else {asking, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    continue  # a slot became free
                leased = asking.result()
            finally:
                asking.cancel()
                ended.cancel()
                await asyncio.gather(asking, ended, return_exceptions=True)
            self._lease_seconds = leased.lease_seconds
            for task in leased.tasks:
                self._playing[task.lease_id] = asyncio.create_task(self._play(path, task))

    async def _play(self, path: str, task: pb.AgentTask) -> None:
        try:
            result = await self._result(path, task)
            self.num_played += 1
            await self._rollout.finish_task(result)
        except asyncio.CancelledError:
            if self._absence is None:
                await self._return(task.lease_id)
            raise
        except HeadraceError as error:  # the service is away: the lease ends by itself
            log.warning("task_result_lost", sample_id=task.sample_id, message=error.message)
        finally:
            self._playing.pop(task.lease_id, None)
            self._ended.set()

    async def _result(self, path: str, task: pb.AgentTask) -> pb.FinishTaskRequest:
        work = (path, self._args, task_of(task), task.base_url.removesuffix("/v1"))
        try:
            reward = await self._pool.run(run_agent, *work, timeout_seconds=task.seconds, name=f"agent {path}")
        except WorkerError as error:
            failure = sample_pb2.Failure(reason=call_failure(error).reason, message=error.message)
            return pb.FinishTaskRequest(lease_id=task.lease_id, failure=failure)
        if isinstance(reward, Mapping):
            return pb.FinishTaskRequest(lease_id=task.lease_id, reward_parts_json=json.dumps(reward))
        return pb.FinishTaskRequest(lease_id=task.lease_id, reward=reward)

    async def _return(self, lease_id: str) -> None:
        request = pb.FinishTaskRequest(lease_id=lease_id, returned=True)
        try:
            await self._rollout.finish_task(request, deadline_seconds=_RETURN_SECONDS)
        except HeadraceError as error:
            log.warning("task_not_returned", lease_id=lease_id, message=error.message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS_A_LEASE)
            if not self._playing or self._absence is not None:
                continue
            try:
                renewed = await self._rollout.renew_tasks(
                    self._host_id, list(self._playing), deadline_seconds=self._lease_seconds
                )
            except (Unavailable, DeadlineExceeded):
                continue  # `_patiently` decides how long that may last
            for lost in renewed:
                if playing := self._playing.get(lost):
                    playing.cancel()

    async def _patiently(self, most: int, wait_seconds: float, **asked: Any) -> pb.LeaseTasksResponse:
        """Asks for tasks until there is an answer. Raises _ServiceEnded, or Unavailable after a long absence."""
        while True:
            is_away = self._absence is not None
            try:
                reply = await self._rollout.lease_tasks(
                    self._host_id,
                    most,
                    wait_seconds=0.0 if is_away else wait_seconds,
                    deadline_seconds=_LOOK_SECONDS if is_away else wait_seconds + _ANSWER_SECONDS,
                    **asked,
                )
            except (Unavailable, DeadlineExceeded) as error:
                self._missed(error)
                if isinstance(error, Unavailable):
                    await asyncio.sleep(_LOOK_SECONDS)
                continue
            self._absence = None
            return reply

    def _missed(self, error: HeadraceError) -> None:
        """An ask without an answer: remembers since when, and ends the host when that has lasted too long."""
        now, is_goodbye = time.monotonic(), error.reason == _SERVER_ENDS
        if isinstance(error, DeadlineExceeded) and self._rollout.is_connected():
            self._absence = None  # it is there, and starts or is busy
            return
        if self._absence is None or (is_goodbye and not self._absence.said_goodbye):
            self._absence = _Absence(now, is_goodbye)
            self._tell(self._absence.said(_RESTART_SECONDS if is_goodbye else self._patience_seconds))
        if self._is_over() or (self._absence.said_goodbye and now - self._absence.since > _RESTART_SECONDS):
            raise _ServiceEnded
        if now - self._absence.since > self._patience_seconds:
            raise Unavailable(
                f"the rollout service could not be reached for {self._patience_seconds:g} s: {error.message}"
            )

    async def _close(self) -> None:
        playing = list(self._playing.values())
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await self._pool.close()


def task_of(task: pb.AgentTask) -> Task:
    """The task as the user's function is given it."""
    messages = [
        {"role": each.role, "content": each.content, **from_json(each.extra_json)} for each in task.messages.messages
    ]
    return Task(
        prompt=messages if task.WhichOneof("prompt") == "messages" else task.text,
        label=label_for_hooks(task.label if task.HasField("label") else None, {LABEL_IS_JSON: task.label_is_json}),
        metadata=from_json(task.metadata_json),
        index=task.index,
        evaluation=task.evaluation,
    )
