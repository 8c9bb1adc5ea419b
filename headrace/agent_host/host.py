"""Leases tasks, plays them in worker processes, and says what came of them.

consumes: tasks of the rollout service; waits for: a free place, then a task; unblocked by: the end of a task, in any
way. A lease is renewed while its task is played; one that has ended stops its task. A host that is stopped returns its
tasks; one that is killed says nothing, and its leases run out.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import ConfigError, HeadraceError, Unavailable
from headrace.hooks.agent import Task, require_agent, run_agent
from headrace.hooks.args import HookArgs
from headrace.hooks.failure import call_failure
from headrace.process.workers import WorkerError, WorkerPool
from headrace.rpc.log import log
from headrace.wire.json_text import from_json

_LOAD_SECONDS = 120.0
_WAIT_SECONDS = 20.0
_RETURN_SECONDS = 5.0
_RENEWALS_A_LEASE = 4


class AgentHost:
    """States: built → running → ended."""

    def __init__(
        self,
        rollout: RolloutClient,
        path: str | None,
        *,
        concurrency: int,
        workers: int,
        patience_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        """`path`: the agent; None for the one that the job names. `patience_seconds`: for a service that is away."""
        self._rollout = rollout
        self._path = path
        self._concurrency = concurrency
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._host_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._pool = WorkerPool(workers, calls_per_worker=-(-concurrency // workers))
        self._args = HookArgs({})
        self._lease_seconds = 0.0
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self.num_played = 0

    async def run(self) -> None:
        """Plays until it is cancelled.

        Raises FailedPrecondition where the job lends no tasks, ConfigError when the agent cannot be loaded, and
        Unavailable when the service was away for too long.
        """
        try:
            path = await self._prepare()
            async with asyncio.TaskGroup() as work:
                work.create_task(self._renew())
                work.create_task(self._lease(path))
        except* HeadraceError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._close()

    async def _prepare(self) -> str:
        job = await self._patiently(lambda: self._rollout.lease_tasks(self._host_id, 0, return_args=True))
        self._args, self._lease_seconds = HookArgs(json.loads(job.args_json or "{}")), job.lease_seconds
        path = self._path or job.agent_function_path
        try:
            await self._pool.run(require_agent, path, timeout_seconds=_LOAD_SECONDS, name=f"agent {path}")
        except WorkerError as error:
            raise ConfigError(error.message, field="agent_function_path") from error
        self._tell(f"agent host {self._host_id} plays {path}, {self._concurrency} tasks at once")
        return path

    async def _lease(self, path: str) -> None:
        while True:
            self._ended.clear()
            if len(self._playing) >= self._concurrency:
                await self._ended.wait()
                continue
            leased = await self._patiently(self._next)
            self._lease_seconds = leased.lease_seconds
            for task in leased.tasks:
                self._playing[task.lease_id] = asyncio.create_task(self._play(path, task))

    async def _next(self) -> pb.LeaseTasksResponse:
        free = self._concurrency - len(self._playing)
        return await self._rollout.lease_tasks(self._host_id, free, wait_seconds=_WAIT_SECONDS)

    async def _play(self, path: str, task: pb.AgentTask) -> None:
        try:
            result = await self._result(path, task)
            self.num_played += 1
            await self._rollout.finish_task(result)
        except asyncio.CancelledError:
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
            if not self._playing:
                continue
            for lost in await self._patiently(lambda: self._rollout.renew_tasks(self._host_id, list(self._playing))):
                if playing := self._playing.get(lost):
                    playing.cancel()

    async def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Asks until the service has been away for `patience_seconds`."""
        end = time.monotonic() + self._patience_seconds
        while True:
            try:
                return await ask()
            except Unavailable:
                if time.monotonic() > end:
                    raise

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
        label=task.label if task.HasField("label") else None,
        metadata=from_json(task.metadata_json),
        index=task.index,
        evaluation=task.evaluation,
    )
