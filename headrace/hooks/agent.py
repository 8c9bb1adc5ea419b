"""Agents: a user's function that plays a task against an OpenAI-compatible URL, which records what the policy says."""

from __future__ import annotations

import inspect
import os
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook, load_hook
from headrace.hooks.reward import checked_reward
from headrace.hooks.signature import Signature, wrong_signature
from headrace.rpc.proxies import direct_to

ACCEPTED = ("async def run(args, task, base_url) -> reward | None",)


@dataclass
class Task:
    """One prompt to play. An agent may change it; nobody reads it afterwards."""

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages where the row has messages."""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's; its tool definitions are in `metadata["tools"]`."""
    index: int = 0
    """The number of this sample among those of its prompt, from 0."""
    evaluation: bool = False
    """Nobody trains on it."""


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
    made = _agent(path).target(args, task, base_url)
    reward = await made if inspect.isawaitable(made) else made
    if reward is None:
        return None
    checked = checked_reward(path, reward)
    if isinstance(checked, str):
        raise InvalidArgument(f"agent {path} returned what is no reward: {checked}")
    return checked


def is_agent(hook: Hook) -> bool:
    """True for a function whose third argument is `base_url`."""
    return not inspect.isclass(hook.target) and "base_url" in Signature.of(hook.target).required


def _agent(path: str) -> Hook:
    hook = load_hook(path)
    signature = Signature.of(hook.target)
    if (
        inspect.isclass(hook.target)
        or len(signature.required) != len(("args", "task", "base_url"))
        or signature.required_keywords
    ):
        raise wrong_signature(hook.path, hook.target, ACCEPTED)
    return hook
