"""The table of scorers that come with headrace. Their modules are imported in workers only, when they are needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.hooks import HookArgs, Reward
from headrace.score import ScoreItem
from headrace.wire.limits import (
    MAX_CODE_SECONDS,
    MAX_MATH_CPU_SECONDS,
    MAX_REGEX_SECONDS,
    MAX_REMOTE_SECONDS,
    MAX_SCORER_SECONDS,
)
from services.reward.cpu_limit import TooSlow, cpu_limit

BOXED = "boxed_"
"""The prefix of a scorer's name with which only the content of the response's last box is scored."""
_SLOW_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Builtin:
    """A file in scorers/. With a `package`, the package's version is the scorer's. `max_seconds` limits one item.

    One that `waits` has a coroutine as its `score`, and one that asks a `remote` server is given the job's options. An
    answer that takes more than `cpu_seconds` of processor time, where that is set, is `wrong`. Of a reward in parts the
    `part` counts, unless --reward-key names another. The package is in the `extra` of headrace.
    """

    name: str
    description: str
    package: str | None = None
    extra: str = "reward"
    version: str = "1"
    max_seconds: float = MAX_SCORER_SECONDS
    cpu_seconds: float | None = None
    waits: bool = False
    remote: bool = False
    wrong: Reward = 0.0
    part: str | None = None


BUILTINS: Sequence[Builtin] = (
    Builtin(
        "code",
        "1 when the response's last block of Python passes the task's tests, in a sandbox.",
        max_seconds=MAX_CODE_SECONDS,
        waits=True,
    ),
    Builtin(
        *("dapo", "1 when what follows the last `Answer:` equals the label, as math compares; else -1.", "math-verify"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
        wrong={"score": -1.0, "acc": 0.0},
        part="score",
    ),
    Builtin(
        "deepscaler",
        "math, but only a boxed answer after </think> counts.",
        "math-verify",
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin("exact_match", "1 when the response without surrounding blanks is the label."),
    Builtin("f1", "The overlap of words with the label, as F1 from 0 to 1."),
    Builtin("gpqa", "1 when the answer is the right letter of several choices, or that choice's text."),
    Builtin(
        *("ifbench", "1 when the response follows all instructions of a row of IFBench.", "if-verifiable", "ifbench"),
        part="score",
    ),
    Builtin(
        "judge",
        "A language model's grade, from 0 to 1: --judge-url.",
        max_seconds=MAX_REMOTE_SECONDS,
        waits=True,
        remote=True,
    ),
    Builtin(
        *("math", "1 when the boxed or last answer equals the label, by math-verify.", "math-verify"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin("random", "1 or 0 by chance."),
    Builtin(
        *("reasoning_gym", "A reasoning_gym task's own score of the answer.", "reasoning-gym"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin("regex", "1 when metadata.pattern, or the label, is found in the response.", max_seconds=MAX_REGEX_SECONDS),
    Builtin(
        "remote_rm",
        "What the server at --rm-url answers.",
        max_seconds=MAX_REMOTE_SECONDS,
        waits=True,
        remote=True,
    ),
)


def installed() -> dict[str, str]:
    """Returns name → version of the scorers whose packages are installed."""
    versions = {}
    for builtin in BUILTINS:
        if builtin.package is None:
            versions[builtin.name] = f"headrace {builtin.version}"
        elif importlib.util.find_spec(builtin.package.replace("-", "_")):
            versions[builtin.name] = f"{builtin.package} {importlib.metadata.version(builtin.package)}"
    return versions


def run_builtin(name: str, item: ScoreItem) -> Reward:
    """Scores an item. Runs in a worker; `name` is one of `BUILTINS`."""
    value: Reward = importlib.import_module(f"services.reward.scorers.{name}").score(item)
    return value


async def run_waiting_builtin(name: str, item: ScoreItem) -> Reward:
    """The same for a scorer that waits for processes of its own."""
    value: Reward = await importlib.import_module(f"services.reward.scorers.{name}").score(item)
    return value


async def run_remote_builtin(name: str, item: ScoreItem, args: HookArgs) -> Reward:
    """The same for a scorer that asks another server, which the job's options name."""
    value: Reward = await importlib.import_module(f"services.reward.scorers.{name}").score(item, args)
    return value


def run_builtin_within(name: str, item: ScoreItem, cpu_seconds: float) -> Reward | None:
    """Scores an item, or returns None when that takes more than `cpu_seconds` of processor time."""
    importlib.import_module(f"services.reward.scorers.{name}")  # takes seconds, once, and is not the answer's fault
    try:
        with cpu_limit(cpu_seconds):
            return run_builtin(name, item)
    except TooSlow:
        return None


def prepare_slow(default: str | None) -> None:
    """Prepares a worker like `prepare_builtin`, at a low priority for the processors."""
    os.nice(_SLOW_NICENESS)
    prepare_builtin(default)


def prepare_builtin(default: str | None) -> None:
    """Imports what the default scorer needs. Its warning about timeouts is silenced: the pool has its own."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if default is not None:
        importlib.import_module(f"services.reward.scorers.{default.removeprefix(BOXED)}")
