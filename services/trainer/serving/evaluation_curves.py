"""The picture of a run's evaluations: each data set's mean with its 95 % interval, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.whole_file import replacing
from services.trainer.serving.row import MetricsRow

_MEAN, _PASS = "eval/", "eval_pass/"


def draw_evaluations(rows: Sequence[MetricsRow], path: Path) -> None:
    """Writes a PNG, if there is an evaluation with a result."""
    rows = sorted(
        (row for row in rows if any(name.startswith(_MEAN) for name in row.metrics)), key=lambda row: row.step
    )
    if not rows:
        return
    metrics = sorted({name for row in rows for name in row.metrics})
    names = [name.removeprefix(_MEAN) for name in metrics if name.startswith(_MEAN)]
    passes = sorted(
        {name for row in rows for name in row.metrics if name.startswith(_PASS) and not name.endswith("@1")}
    )
    figure = Figure(figsize=(12 if passes else 7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    means = figure.add_subplot(1, 2 if passes else 1, 1)
    for name in names:
        _draw_mean(means, rows, name)
    _explain(means, "mean reward and 95 % interval")
    if passes:
        shares = figure.add_subplot(1, 2, 2)
        for metric in passes:
            points = [(row.step, row.metrics[metric]) for row in rows if metric in row.metrics]
            shares.plot(*zip(*points, strict=True), marker="o", markersize=3, label=metric.removeprefix(_PASS))
        shares.set_ylim(-0.02, 1.02)
        _explain(shares, "pass@k")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=110)


def _draw_mean(axes: Axes, rows: Sequence[MetricsRow], name: str) -> None:
    points = [(row.step, row.metrics[_MEAN + name]) for row in rows if _MEAN + name in row.metrics]
    (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
    low, high = f"eval_low/{name}", f"eval_high/{name}"
    bounded = [(row.step, row.metrics[low], row.metrics[high]) for row in rows if low in row.metrics]
    if bounded:
        steps, lows, highs = zip(*bounded, strict=True)
        axes.fill_between(steps, lows, highs, alpha=0.2, color=line.get_color(), linewidth=0)


def _explain(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
