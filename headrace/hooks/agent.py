"""Agents: a user's function that plays a task against an OpenAI-compatible URL, which records what the policy says."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import InvalidArgument, Unavailable
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook, Signature, awaited, load_function
from headrace.hooks.reward import checked_reward
from headrace.rpc.proxies import direct_to

ROLE_MARK = "~"
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
ACCEPTED = ("async def run(args, task, base_url) -> reward | None",)
_LISTEN_SECONDS = 2.0


@dataclass
class Task:
    """One prompt to play. An agent may change it; nobody reads it afterwards."""

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages where the row has messages."""
    label: str | dict[str, Any] | list[Any] | None = None
    """Text, or the object or list that the row holds."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's; its tool definitions are in `metadata["tools"]`."""
    index: int = 0
    """The number of this sample among those of its prompt, from 0."""
    evaluation: bool = False
    """Nobody trains on it."""


def as_role(base_url: str, role: str) -> str:
    """Returns the base URL for one of several agents of a task, such as a proposer and a solver.

    Each role's samples are trained on the role's own reward, against the same role in the group's other runs. The
    agent returns `{role: reward}`, or one reward for all. Raises InvalidArgument for a name that is no word.
    """
    if not _ROLE.fullmatch(role):
        raise InvalidArgument(f"role {role[:40]!r}: name it by a word of at most 32 letters, digits, - and _")
    session, _, version = base_url.rpartition("/")
    return f"{session.partition(ROLE_MARK)[0]}{ROLE_MARK}{role}/{version}"


def require_agent(path: str) -> str:
    """Runs in a worker: the name of the function. Raises ConfigError unless it can be called as an agent."""
    return _agent(path).path


async def run_agent(path: str, args: HookArgs, task: Task, session_url: str) -> float | dict[str, Any] | None:
    """Plays the task, and returns the reward that the agent gives itself, if it does. Runs in a worker.

    A run that is begun again, because another agent ended this process, has a URL of its own: `session_url` ends with
    the session's id.
    """
    os.environ.update(direct_to(urlsplit(session_url).hostname or ""))
    base_url = f"{session_url}.{secrets.token_hex(4)}/v1"
    agent = _agent(path).target
    try:
        reward = await awaited(agent(args, task, base_url))
    except Exception as error:
        if await asyncio.to_thread(_listens, session_url):
            raise
        raise Unavailable(
            f"agent {path} raised {type(error).__name__}, because nothing listens at its base_url: the rollout service "
            "has ended"
        ) from None
    if reward is None:
        return None
    checked = checked_reward(path, reward)
    if isinstance(checked, str):
        raise InvalidArgument(f"agent {path} returned what is no reward: {checked}")
    return checked


def _listens(url: str) -> bool:
    """False where no process listens at the address of the URL."""
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=_LISTEN_SECONDS):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def is_agent(hook: Hook) -> bool:
    """True for a function whose third argument is `base_url`."""
    return not inspect.isclass(hook.target) and "base_url" in Signature.of(hook.target).required


def _agent(path: str) -> Hook:
    return load_function(path, ACCEPTED, (len(("args", "task", "base_url")),))
