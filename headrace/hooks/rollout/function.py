"""Calls a user's rollout function in its worker, and sends what it returns to the service, group by group."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.errors import Unavailable
from headrace.hooks.args import HookArgs
from headrace.hooks.generate import sendable
from headrace.hooks.kit.conversation import Call, attach_tokens, calling
from headrace.hooks.load import Hook, awaited, load_function, takes
from headrace.hooks.rollout.data_source import LedgerDataSource, no_data_source, whole_groups
from headrace.hooks.rollout.messages import HEADER, Ask, Order, Reply, packed
from headrace.hooks.rollout.outputs import EvalData, RolloutFnEvalOutput, eval_data, eval_output, numbers, train_output
from headrace.process.worker_main import Unreadable, decode_as

ACCEPTED = ("def f(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput",)
_EVALUATION = "evaluation"


@dataclass(frozen=True)
class RolloutReport:
    """The end of a call: the number of groups that it has ended, by returning them too, and why others are unusable."""

    num_ended: int
    unusable: list[str]
    metrics: dict[str, float]


@dataclass(frozen=True)
class EvalReport:
    """An evaluation's samples by data sets."""

    data: dict[str, EvalData]
    metrics: dict[str, float]


def load_rollout(path: str) -> bool:
    """Runs in a worker: True for a function that evaluates too. Raises ConfigError for another signature."""
    return takes(rollout_hook(path), _EVALUATION)


def rollout_hook(path: str) -> Hook:
    """Loads it. Raises ConfigError unless it can be called as slime calls it."""
    return load_function(path, ACCEPTED, (3,), (_EVALUATION,))


async def run_rollout(
    path: str, args: HookArgs, rollout_id: int, sampling_params: Mapping[str, Any], socket_path: str
) -> RolloutReport:
    """Runs in a worker, and ends the groups that the function returns. Raises InvalidArgument for other returns.

    `socket_path`: of the service, for this call's data source.
    """
    with connected(socket_path) as ask:
        return await roll_out(path, args, rollout_id, sampling_params, ask)


async def roll_out(
    path: str, args: HookArgs, rollout_id: int, sampling_params: Mapping[str, Any], ask: Ask
) -> RolloutReport:
    """Calls the function with a data source that asks `ask`."""
    hook = rollout_hook(path)
    options = {_EVALUATION: False} if takes(hook, _EVALUATION) else {}
    with calling(Call(args, (), sampling_params)) as call:
        source = LedgerDataSource(args, ask, lambda sample: sendable(path, attach_tokens(sample, call)))
        output = train_output(path, await awaited(hook.target(args, rollout_id, source, **options)))
        groups = whole_groups(output.samples)
        source.drop_finished(groups)
        unusable = [why for group in groups if (why := source.return_group(group)) is not None]
    return RolloutReport(source.num_ended, unusable, numbers(output.metrics))


async def run_eval_rollout(
    path: str,
    args: HookArgs,
    rollout_id: int,
    sampling_params: Mapping[str, Any],
    reward_keys: Mapping[str, str],
) -> EvalReport:
    """Runs in a worker. Raises InvalidArgument for a return that has no rewards."""
    hook = rollout_hook(path)
    with calling(Call(args, (), sampling_params)):
        source = LedgerDataSource(args, no_data_source)
        returned = await awaited(hook.target(args, rollout_id, source, evaluation=True))
        output: RolloutFnEvalOutput = eval_output(path, returned)
    data = {str(name): eval_data(path, str(name), each, reward_keys) for name, each in output.data.items()}
    return EvalReport(data, numbers(output.metrics))


@contextmanager
def connected(socket_path: str) -> Iterator[Ask]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(socket_path)
        with channel.makefile("rb") as replies:

            def ask(order: Order) -> Reply:
                try:
                    channel.sendall(packed(order))
                    (size,) = HEADER.unpack(replies.read(HEADER.size))
                    reply: Reply = decode_as(Reply, replies.read(size))
                except (OSError, struct.error, Unreadable) as error:
                    raise Unavailable(
                        "the call of the rollout function has ended: its data source is closed"
                    ) from error
                return reply

            yield ask
