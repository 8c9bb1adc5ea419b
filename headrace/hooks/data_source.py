"""Data sources: a user's class that gives prompts. It lives in one worker process and is made anew wherever that ends.

A class with `save` and `load` is asked to save after every answer and to load what belongs to the number of groups that
the ledger has taken. One without them has to answer the same whenever it is made: it is wound forward by asking again,
in as many calls as that takes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import load_hook
from headrace.hooks.plain import plain
from headrace.hooks.sample import Sample

_AT_ONCE = 256


@dataclass
class _Alive:
    source: Any
    position: int
    keeps_state: bool


@dataclass
class _Holder:
    alive: _Alive | None = None


@cache
def _holder(path: str) -> _Holder:
    """A place of the worker process: user code keeps its state between calls here and nowhere else."""
    return _Holder()


def load_data_source(path: str) -> tuple[bool, bool]:
    """Runs in a worker: (keeps its own state, takes groups back). Raises ConfigError for what is no data source."""
    hook = load_hook(path)
    if not inspect.isclass(hook.target):
        raise ConfigError(f"hook {path} is no class: a data source is a class with get_samples(n)")
    names = {name for name, _ in inspect.getmembers(hook.target, inspect.isfunction)}
    if "get_samples" not in names:
        raise ConfigError(f"hook {path} has no get_samples(n): a data source returns its prompts from it")
    if ("save" in names) != ("load" in names):
        raise ConfigError(f"hook {path} has only one of save(id) and load(id): define both, or neither")
    return "save" in names, "add_samples" in names


def wind_data_source(path: str, args: HookArgs, position: int, seconds: float) -> int:
    """Goes towards `position` for about `seconds`, and answers where it is then. Runs in a worker."""
    alive, end, count = _before(path, args, position), time.monotonic() + seconds, 1
    while alive.position < position and time.monotonic() < end:
        _forward(path, alive, position, count)
        count = min(2 * count, _AT_ONCE)  # so that the last answer takes about as long as all before it
    return alive.position


def read_data_source(path: str, args: HookArgs, position: int, count: int) -> list[Sample]:
    """Reads at most `count` groups after the first `position`, each by its first sample. Runs in a worker."""
    alive = _at(path, args, position)
    prompts = _groups(path, alive, count)
    if alive.keeps_state and prompts:
        alive.source.save(alive.position)
    return prompts


def try_data_source(path: str, args: HookArgs, count: int) -> list[Sample]:
    """The first prompts of a new one, which saves nothing."""
    keeps_state, _ = load_data_source(path)
    return _groups(path, _Alive(load_hook(path).target(args), 0, keeps_state), count)


def add_to_data_source(path: str, args: HookArgs, position: int, groups: Sequence[list[Sample]]) -> None:
    """Groups that the ledger gave up come back, to a class that keeps its state. Runs in a worker."""
    alive = _at(path, args, position)
    alive.source.add_samples([list(group) for group in groups])
    alive.source.save(alive.position)


def _at(path: str, args: HookArgs, position: int) -> _Alive:
    """`wind_data_source` went before, so there is nothing to wind unless its worker ended since."""
    alive = _before(path, args, position)
    while alive.position < position:
        _forward(path, alive, position, _AT_ONCE)
    return alive


def _before(path: str, args: HookArgs, position: int) -> _Alive:
    """The object, at the position or before it."""
    alive = _holder(path).alive
    if alive is None or alive.position > position or (alive.position < position and alive.keeps_state):
        alive = _holder(path).alive = _Alive(load_hook(path).target(args), 0, load_data_source(path)[0])
        if alive.keeps_state and position:
            alive.source.load(position)
            alive.position = position
    return alive


def _forward(path: str, alive: _Alive, position: int, count: int) -> None:
    if not _groups(path, alive, min(position - alive.position, count)):
        raise InvalidArgument(
            f"hook {path} gave {position} groups before and now only {alive.position}: it must answer the same "
            "whenever it is made, or have save and load"
        )


def _groups(path: str, alive: _Alive, count: int) -> list[Sample]:
    groups = alive.source.get_samples(count)
    if not isinstance(groups, list) or len(groups) > count:
        found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise InvalidArgument(
            f"hook {path} returned {found} for get_samples({count}); it must return a list of as many"
        )
    firsts = [group[0] if isinstance(group, list) and group else group for group in groups]
    strangers = {type(first).__name__ for first in firsts if not isinstance(first, Sample)}
    if strangers:
        raise InvalidArgument(f"hook {path} returned a list of {sorted(strangers)}; it must hold groups of Sample")
    alive.position += len(firsts)
    return [plain(first) for first in firsts]
