"""`headrace runs`: lists the runs of a folder, or compares two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from headrace.cli.arg_types import PATH, RUNS, json_option, print_json
from headrace.cli.runs import find_run
from headrace.cli.view.lines import evaluations, print_no_wrap
from headrace.cli.view.run_view import sparkline
from headrace.job.schema.job import Change, changes
from headrace.launch.previous_run import previous_run
from headrace.run_folder import RunFolder, fields_in

_REWARDS = ("reward/all/mean", "reward/mean")
"""The mean of all scored groups where there is one: a filter chooses what is trained."""
_COMPARED = (
    *("reward/mean", "loss/kl", "loss/sft", "entropy", "grad_norm", "log_prob_diff/mean", "ppo_kl", "truncated_ratio"),
    *("response_length/mean", "staleness/mean", "tokens_per_second", "time/step_seconds"),
)
_SPARKS = 24
_LAST_STEPS = 3
"""A figure of one step is noise: the last three are averaged."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of the list. `step` counts from 1; rewards are means of the first and the last three steps."""

    name: str
    state: str
    """running, finished, interrupted or unreadable"""
    step: int
    num_steps: int | None
    first_reward: float | None
    last_reward: float | None
    evaluations: Mapping[str, tuple[float, float]]
    """Each data set's first and last mean."""
    model: str | None
    changed: float
    """When its metrics were written last, in seconds since 1970."""


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN RUN]")
@click.option("--run-dir", type=PATH, default=RUNS, show_default=True, help="The folder that holds the runs.")
@json_option
def runs(names: Sequence[str], run_dir: Path, as_json: bool) -> int:
    """Lists the runs here, the newest first. With two names it compares their jobs and their metrics."""
    if names and len(names) != 2:
        raise click.UsageError(f"{len(names)} runs are named: name two runs to compare them, or none to list all")
    if names:
        first, second = (find_run(str(run_dir / name) if (run_dir / name).is_dir() else name) for name in names)
        return _compare(first, second, as_json)
    found = sorted(map(_summary, _folders(run_dir)), key=lambda each: each.changed, reverse=True)
    if as_json:
        print_json(found)
    elif not found:
        print(f"no runs in {run_dir.absolute()}: `headrace init` makes a job, `headrace train` starts it")
    else:
        print_no_wrap(Console(), _listed(found))
    return 0


def _folders(run_dir: Path) -> list[RunFolder]:
    return [RunFolder(file.parent) for file in run_dir.glob("*/services.json")]


def _summary(run: RunFolder) -> RunSummary:
    previous = previous_run(run)
    rows = list(fields_in(run.metrics))
    rewards = _series(rows, _reward_name(rows))
    step = max((row["step"] for row in rows if "grad_norm" in row), default=0)
    wanted = previous.job.rollout.num_rollout if previous else None
    return RunSummary(
        name=run.path.name,
        state=_state(run, previous is not None, step, wanted),
        step=step,
        num_steps=wanted,
        first_reward=_mean(rewards[:_LAST_STEPS]),
        last_reward=_mean(rewards[-_LAST_STEPS:]),
        evaluations={name: (values[0], values[-1]) for name, values in _evaluations(rows).items()},
        model=str(previous.job.model.hf_checkpoint) if previous else None,
        changed=(run.metrics if run.metrics.exists() else run.services_file).stat().st_mtime,
    )


def _state(run: RunFolder, readable: bool, step: int, wanted: int | None) -> str:
    if run.running_services():
        return "running"
    if not readable:
        return "unreadable"
    return "finished" if wanted is not None and step >= wanted else "interrupted"


def _listed(found: Sequence[RunSummary]) -> Table:
    table = Table("run", "state", "step", "reward", "evaluation", "model", "last change", box=None, pad_edge=False)
    for each in found:
        table.add_row(
            each.name,
            each.state,
            f"{each.step}/{each.num_steps or '?'}",
            _change_of(each.first_reward, each.last_reward),
            ", ".join(f"{name} {_change_of(*ends)}" for name, ends in each.evaluations.items()),
            Path(each.model).name if each.model else "",
            datetime.fromtimestamp(each.changed).strftime("%Y-%m-%d %H:%M"),
        )
    return table


def _change_of(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{before:.3f} → {after:.3f}"


def _compare(first: RunFolder, second: RunFolder, as_json: bool) -> int:
    """Prints what differs. Raises DataLoss for a run whose job cannot be read."""
    differing = [each for each in changes(first.job(), second.job()) if each.name not in ("run_name", "run_dir")]
    rows = [list(fields_in(run.metrics)) for run in (first, second)]
    figures = _figures(rows)
    if as_json:
        tree = {
            "runs": [str(first.path), str(second.path)],
            "job": [{"flag": each.flag, "values": [each.old, each.new]} for each in differing],
            "metrics": {name: list(values) for name, values in figures.items()},
        }
        print_json(tree)
        return 0
    console = Console()
    print_no_wrap(console, _options(differing, first, second))
    print_no_wrap(console, _curves(rows, first, second))
    print_no_wrap(console, _side_by_side(figures, first, second))
    return 0


def _options(differing: Sequence[Change], first: RunFolder, second: RunFolder) -> Table | str:
    if not differing:
        return "their jobs are the same\n"
    table = Table("option", first.path.name, second.path.name, box=None, pad_edge=False)
    for each in differing:
        table.add_row(each.flag, each.old, each.new)
    return table


def _curves(rows: Sequence[Sequence[Mapping[str, Any]]], first: RunFolder, second: RunFolder) -> Table:
    """The rewards of both over their steps."""
    table = Table("", "steps", "reward", "", box=None, pad_edge=False)
    for run, own in zip((first, second), rows, strict=True):
        rewards = _series(own, _reward_name(own))
        ends = _change_of(_mean(rewards[:_LAST_STEPS]), _mean(rewards[-_LAST_STEPS:]))
        table.add_row(run.path.name, str(len(rewards)), sparkline(rewards[-_SPARKS:]), ends)
    return table


def _figures(rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, tuple[float | None, float | None]]:
    """Means of each run's last three steps, and its last evaluations."""
    found: dict[str, tuple[float | None, float | None]] = {}
    last = [_evaluations(own) for own in rows]
    for name in sorted({name for each in last for name in each}):
        first, second = (each[name][-1] if name in each else None for each in last)
        found[name] = (first, second)
    for name in (_REWARDS[0], *_COMPARED):
        first, second = (_mean(_series(own, name)[-_LAST_STEPS:]) for own in rows)
        if first is not None or second is not None:
            found[name] = (first, second)
    return found


def _side_by_side(
    figures: Mapping[str, tuple[float | None, float | None]], first: RunFolder, second: RunFolder
) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("last steps")
    for heading in (first.path.name, second.path.name, "change"):
        table.add_column(heading, justify="right")
    for name, (was, now) in figures.items():
        change = "" if was is None or now is None else f"{now - was:+.4g}"
        table.add_row(name, *("–" if each is None else f"{each:.4g}" for each in (was, now)), change)
    return table


def _reward_name(rows: Sequence[Mapping[str, Any]]) -> str:
    return next((name for name in _REWARDS if any(name in row for row in rows)), _REWARDS[-1])


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The metric's values in the order of steps; of a step that was trained twice the last one."""
    return [value for _, value in sorted({row["step"]: float(row[name]) for row in rows if name in row}.items())]


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    names = {name for row in rows for name in evaluations(row)}
    return {name: _series(rows, name) for name in sorted(names)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
