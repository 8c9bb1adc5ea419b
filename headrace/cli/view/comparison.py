"""Two runs over the same rollout steps, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from headrace.run_folder import fields_in

_LOSSES = ("loss/policy", "loss/sft", "loss/custom")
_SHOWN = ("grad_norm", "entropy")
_OF_THE_MACHINE = (
    "time/",
    "busy/",
    "publish/",
    "reward/all/",
    "samples/filtered",
    "samples/produced",
    "eval",
    "tokens_per_second",
    "tflops_per_rank",
    "mfu",
)
"""What depends on more than the samples and the settings."""

Rows = Mapping[int, Mapping[str, float]]


def compared(recorded: Path, replayed: Path, *, after: int) -> Iterator[RenderableType]:
    """A table of the steps that both trained, and a sentence that says whether all their figures are the same."""
    before, now = _steps(recorded), _steps(replayed)
    steps = sorted(step for step in before.keys() & now.keys() if step > after)
    if not steps:
        yield "no step was trained by both runs"
        return
    yield _table(before, now, steps)
    if (first := next(((step, name) for step in steps for name in _different(before[step], now[step])), None)) is None:
        yield f"steps {steps[0]} to {steps[-1]} are the same in every figure, bit for bit"
    else:
        step, name = first
        yield f"they differ from step {step} on: {name} {before[step][name]!r} was {now[step][name]!r} now"


def _table(before: Rows, now: Rows, steps: list[int]) -> Table:
    both = {name for step in steps for name in before[step].keys() & now[step].keys()}
    names = [name for name in (*_LOSSES, *_SHOWN) if name in both]
    table = Table(box=None, pad_edge=False)
    for heading in ("step", *(each for name in names for each in (name, "replayed"))):
        table.add_column(heading, no_wrap=True, justify="right")
    for step in steps:
        cells = [_cell(rows[step].get(name)) for name in names for rows in (before, now)]
        table.add_row(str(step), *cells)
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _different(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """The figures that both have and that depend on the samples alone."""
    for name in before:
        if name in now and not name.startswith(_OF_THE_MACHINE) and before[name] != now[name]:
            yield name


def _steps(file: Path) -> dict[int, Mapping[str, float]]:
    """Rows of steps, not of evaluations."""
    return {row["step"]: _figures(row) for row in fields_in(file) if "grad_norm" in row}


def _figures(row: Mapping[str, Any]) -> Mapping[str, float]:
    return {name: each for name, each in row.items() if name not in ("step", "time") and isinstance(each, float | int)}
