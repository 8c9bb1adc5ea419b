"""Players of agents' tasks: worker processes of this service, or hosts anywhere (`hosts.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.errors import ConfigError
from headrace.hooks import HookArgs
from headrace.hooks.agent import Task, require_agent, run_agent
from headrace.hooks.reward import Reward
from headrace.process.workers import WorkerError, WorkerPool
from services.rollout.agents.session import Session

_WORKERS = 2
_LOAD_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Played:
    """`reward` is the one that the agent gives itself, if it does; `path` is the function that was called."""

    reward: Reward | None
    path: str


class Player(Protocol):
    """Plays tasks, all at the same time."""

    async def start(self) -> None:
        """Raises ConfigError when the agent cannot be loaded, or takes other arguments."""

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        """Raises WorkerError or HeadraceError when the agent fails."""

    async def close(self) -> None: ...


class WorkerPlayer:
    """Plays in worker processes of this service, at most `calls_at_once` tasks."""

    def __init__(self, path: str, args: HookArgs, url: str, *, seconds: float, calls_at_once: int) -> None:
        self._path = path
        self._args = args
        self._url = url
        self._seconds = seconds
        self.pool = WorkerPool(_WORKERS, calls_per_worker=-(-calls_at_once // _WORKERS))

    async def start(self) -> None:
        try:
            await self.pool.run(require_agent, self._path, timeout_seconds=_LOAD_SECONDS)
        except WorkerError as error:
            raise ConfigError(error.message, field="rollout.agent_function_path") from error

    async def play(self, task: Task, session: Session, sample_id: str) -> Played:
        work = (self._path, self._args, task, f"{self._url}/sessions/{session.session_id}")
        reward: Reward | None = await self.pool.run(
            run_agent, *work, timeout_seconds=self._seconds, name=f"agent {self._path}"
        )
        return Played(reward, self._path)

    async def close(self) -> None:
        await self.pool.close()
