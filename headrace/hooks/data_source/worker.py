"""Data sources at work: the user's object lives in one worker process, and is made again when that process ends.

A class with `save` and `load` is asked to save after every answer and to load what belongs to the number of groups that
the ledger has taken. One without them has to answer the same whenever it is made: it is wound forward by asking again,
in as many calls as that takes, and is then given the groups once more that its ledger still has.
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
from headrace.hooks.convert import plain
from headrace.hooks.data_source import RolloutDataSource
from headrace.hooks.data_source.dataset import Dataset
from headrace.hooks.data_source.generated import (
    Generated,
    ReusedGroup,
    ReuseRequest,
    SourceGroup,
    again,
    groups_of,
    is_finished,
    origin_of,
)
from headrace.hooks.load import Signature, load_hook
from headrace.hooks.sample import Sample

_AT_ONCE = 256


@dataclass(frozen=True)
class SourceForm:
    """The calls that a data source takes besides get_samples."""

    keeps_state: bool
    """Has save and load."""
    takes_samples: bool
    """Its add_samples does something."""
    chooses: bool
    """Has a buffer_filter."""


@dataclass(frozen=True)
class Given:
    """A group of get_samples: a prompt, by its first sample, unless it is `finished` already."""

    prompt: Sample
    finished: ReusedGroup | None = None


@dataclass
class _Alive:
    source: Any
    form: SourceForm
    position: int = 0
    handed: int = 0
    """Generated groups that it was given."""


@dataclass
class _Holder:
    alive: _Alive | None = None


@cache
def _holder(path: str) -> _Holder:
    """A place of the worker process: user code keeps its state between calls here and nowhere else."""
    return _Holder()


def load_data_source(path: str) -> SourceForm:
    """Runs in a worker. Raises ConfigError for what is no data source."""
    target = load_hook(path).target
    if not inspect.isclass(target):
        raise ConfigError(f"hook {path} is no class: a data source is a class with get_samples(n)")
    names = {name for name, _ in inspect.getmembers(target, inspect.isfunction)}
    if "get_samples" not in names:
        raise ConfigError(f"hook {path} has no get_samples(n): a data source returns its prompts from it")
    if ("save" in names) != ("load" in names):
        raise ConfigError(f"hook {path} has only one of save(id) and load(id): define both, or neither")
    takes = getattr(target, "add_samples", RolloutDataSource.add_samples) is not RolloutDataSource.add_samples
    return SourceForm("save" in names, takes, takes and "buffer_filter" in names)


def wind_data_source(path: str, args: HookArgs, position: int, seconds: float) -> int:
    """Goes towards `position` for about `seconds`, and answers where it is then. Runs in a worker."""
    alive, end, count = _before(path, args, position), time.monotonic() + seconds, 1
    while alive.position < position and time.monotonic() < end:
        _forward(path, args, alive, position, count)
        count = min(2 * count, _AT_ONCE)  # so that the last answer takes about as long as all before it
    return alive.position


def read_data_source(path: str, args: HookArgs, position: int, count: int) -> list[Given]:
    """Reads at most `count` groups after the first `position`. Runs in a worker."""
    alive = _at(path, args, position)
    groups = _groups(path, args, alive, count)
    _save(alive, bool(groups))
    return groups


def try_data_source(path: str, args: HookArgs, count: int) -> list[Given]:
    """The first prompts of a new one, which saves nothing."""
    return _groups(path, args, _made(path, args, Dataset.of_example(args)), count)


async def hand_to_data_source(
    path: str, args: HookArgs, position: int, handed: int, groups: Sequence[Generated]
) -> bool:
    """Gives it generated groups, the first `handed` being there. Runs in a worker.

    False when this object was not given as many: the caller has to begin again, with the first.
    """
    alive = _at(path, args, position)
    if alive.handed != handed and not alive.form.keeps_state:
        _holder(path).alive = None
        return False
    wants_groups = "list[list" in str(inspect.signature(alive.source.add_samples)).replace("List", "list")
    for group in groups:
        samples = SourceGroup.of_generated(group, alive.handed).samples
        given = alive.source.add_samples([samples] if wants_groups else samples)
        if inspect.isawaitable(given):
            await given
        alive.handed += 1
    _save(alive, bool(groups))
    return True


async def choose_of_data_source(
    path: str, args: HookArgs, position: int, handed: int, asked: ReuseRequest
) -> list[ReusedGroup] | None:
    """The groups that its buffer_filter chooses to be trained once more. Runs in a worker.

    None where this object was not given `handed` groups, as for `hand_to_data_source`.
    """
    alive = _at(path, args, position)
    if alive.handed != handed and not alive.form.keeps_state:
        return None
    buffer = getattr(alive.source, "buffer", None)
    if not isinstance(buffer, list):
        raise InvalidArgument(f"hook {path} has a buffer_filter and no list self.buffer: keep samples in it")
    buffer[:] = [each for each in buffer if not _is_older(each, asked.oldest)]
    too_early = set(asked.too_early)
    shown = [each for each in buffer if (origin := origin_of(each)) is None or origin.group_id not in too_early]
    if not shown:
        return []
    before = list(shown)
    takes_step = len(Signature.of(alive.source.buffer_filter).required) == 4
    first = (args, asked.step, shown, asked.count) if takes_step else (args, shown, asked.count * asked.n_samples)
    chosen = alive.source.buffer_filter(*first)
    if inspect.isawaitable(chosen):
        chosen = await chosen
    if not isinstance(chosen, list):
        raise InvalidArgument(f"hook {path}: buffer_filter returned {type(chosen).__name__}, must return a list")
    groups = groups_of(path, chosen)[: asked.count]
    _forget(buffer, before, shown)
    _take_out(buffer, groups)
    _save(alive, bool(groups))
    return [again(path, args, group) for group in groups]


def _forget(buffer: list[Any], before: Sequence[Any], after: Sequence[Any]) -> None:
    """Samples that the function took out of the list that it was shown leave the buffer."""
    gone = {id(each) for each in before} - {id(each) for each in after}
    buffer[:] = [each for each in buffer if id(each) not in gone]


def _take_out(buffer: list[Any], groups: Sequence[Sequence[Sample]]) -> None:
    samples = {id(sample) for group in groups for sample in group}
    origins = {id(origin) for group in groups if (origin := origin_of(group[0]))}
    buffer[:] = [
        each
        for each in buffer
        if id(origin_of(each)) not in origins
        and not any(id(sample) in samples for sample in (each if isinstance(each, list) else [each]))
    ]


def _is_older(each: Any, oldest: int | None) -> bool:
    origin = origin_of(each)
    version = origin.oldest_version if origin else None
    return oldest is not None and version is not None and version < oldest


def _save(alive: _Alive, has_changed: bool) -> None:
    if alive.form.keeps_state and has_changed:
        alive.source.save(alive.position)


def _made(path: str, args: HookArgs, dataset: Dataset) -> _Alive:
    """Made with what its __init__ asks for, of dataset and args; one that asks for nothing finds them as attributes."""
    target = load_hook(path).target
    names = Signature.of(target).required
    given = {"dataset": dataset, "args": args}
    if len(names) > 2 or (len(names) == 2 and set(names) != set(given)):
        raise ConfigError(f"hook {path}: __init__ takes {', '.join(names)}; a data source is made with dataset, args")
    source = target(*(given.get(name, args) for name in names))
    for name, value in given.items():
        if not hasattr(source, name):
            setattr(source, name, value)
    return _Alive(source, load_data_source(path))


def _at(path: str, args: HookArgs, position: int) -> _Alive:
    """`wind_data_source` went before, so there is nothing to wind unless its worker ended since."""
    alive = _before(path, args, position)
    while alive.position < position:
        _forward(path, args, alive, position, _AT_ONCE)
    return alive


def _before(path: str, args: HookArgs, position: int) -> _Alive:
    """The object, at the position or before it."""
    alive = _holder(path).alive
    if alive is None or alive.position > position or (alive.position < position and alive.form.keeps_state):
        alive = _holder(path).alive = _made(path, args, Dataset(args))
        if alive.form.keeps_state and position:
            alive.source.load(position)
            alive.position = position
    return alive


def _forward(path: str, args: HookArgs, alive: _Alive, position: int, count: int) -> None:
    if not _groups(path, args, alive, min(position - alive.position, count)):
        raise InvalidArgument(
            f"hook {path} gave {position} groups before and now only {alive.position}: it must answer the same "
            "whenever it is made, or have save and load"
        )


def _groups(path: str, args: HookArgs, alive: _Alive, count: int) -> list[Given]:
    returned = alive.source.get_samples(count)
    groups = groups_of(path, map(_row, returned)) if isinstance(returned, list) else None
    if groups is None or len(groups) > count:
        found = type(returned).__name__ if groups is None else f"{len(groups)} groups"
        raise InvalidArgument(
            f"hook {path} returned {found} for get_samples({count}); it must return a list of as many"
        )
    alive.position += len(groups)
    return [_given(path, args, group) for group in groups]


def _row(each: Any) -> Any:
    """`Sample(prompt=row)` of a dataset's row is that row, with its label and metadata."""
    if isinstance(each, Sample) and isinstance(each.prompt, Sample):
        row = each.prompt
        each.prompt, each.metadata = row.prompt, {**row.metadata, **each.metadata}
        each.label = row.label if each.label is None else each.label
    return each


def _given(path: str, args: HookArgs, group: list[Sample]) -> Given:
    is_prompt = not is_finished(group) or not group[0].tokens
    return Given(plain(group[0])) if is_prompt else Given(Sample(), again(path, args, group))
