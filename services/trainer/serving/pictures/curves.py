"""The picture of a run: reward, response length, loss and the distance between trainer and engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.disk.whole_file import replacing
from services.trainer.serving.pictures.points import Point

_PANELS: Sequence[tuple[str, Sequence[str]]] = (
    ("reward", ("reward/all/mean", "reward/mean")),
    ("evaluation", ("eval/",)),
    ("response tokens", ("response_length/mean",)),
    ("loss", ("loss/policy", "loss/sft", "loss/kl")),
    ("gradient norm", ("grad_norm",)),
    ("|log-prob trainer − engine|", ("log_prob_diff/mean", "log_prob_diff/max")),
)
DRAWN = tuple(start for _, starts in _PANELS for start in starts)
"""Beginnings of the names of the metrics in the picture."""


def draw_curves(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG with a panel for each group of metrics that the run has."""
    names = sorted({name for point in points for name in point.sums})
    panels = [(title, [n for n in names if n.startswith(tuple(starts))]) for title, starts in _PANELS]
    panels = [(title, found) for title, found in panels if found]
    figure = Figure(figsize=(12, 3.2 * ((len(panels) + 1) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, found) in enumerate(panels, start=1):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, place)
        for name in found:
            having = [point for point in points if name in point]
            steps, values = [point.step for point in having], [point.mean(name) for point in having]
            axes.plot(steps, values, marker="o", markersize=3, linewidth=1.2, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", frameon=False)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=110)
