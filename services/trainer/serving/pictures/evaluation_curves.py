"""The picture of a run's evaluations: each data set's mean with its 95 % interval, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.disk.whole_file import replacing
from services.trainer.serving.pictures.points import Point

_MEAN, _PASS, _LOW, _HIGH = "eval/", "eval_pass/", "eval_low/", "eval_high/"
DRAWN = (_MEAN, _PASS, _LOW, _HIGH)
"""Beginnings of the names of the metrics in the picture."""


def draw_evaluations(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG, if there is an evaluation with a result."""
    points = sorted(
        (point for point in points if any(name.startswith(_MEAN) for name in point.sums)), key=lambda point: point.step
    )
    if not points:
        return
    metrics = sorted({name for point in points for name in point.sums})
    names = [name.removeprefix(_MEAN) for name in metrics if name.startswith(_MEAN)]
    passes = [name for name in metrics if name.startswith(_PASS) and not name.endswith("@1")]
    figure = Figure(figsize=(12 if passes else 7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    means = figure.add_subplot(1, 2 if passes else 1, 1)
    for name in names:
        _draw_mean(means, points, name)
    _explain(means, "mean reward and 95 % interval")
    if passes:
        shares = figure.add_subplot(1, 2, 2)
        for metric in passes:
            shares.plot(*_line(points, metric), marker="o", markersize=3, label=metric.removeprefix(_PASS))
        shares.set_ylim(-0.02, 1.02)
        _explain(shares, "pass@k")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=110)


def _draw_mean(axes: Axes, points: Sequence[Point], name: str) -> None:
    (line,) = axes.plot(*_line(points, _MEAN + name), marker="o", markersize=3, linewidth=1.2, label=name)
    steps, lows = _line(points, _LOW + name)
    if steps:
        _, highs = _line(points, _HIGH + name)
        axes.fill_between(steps, lows, highs, alpha=0.2, color=line.get_color(), linewidth=0)


def _line(points: Sequence[Point], metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of those that have it."""
    found = [point for point in points if metric in point]
    return [point.step for point in found], [point.mean(metric) for point in found]


def _explain(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
