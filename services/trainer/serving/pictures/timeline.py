"""The picture of where the time went: each step's seconds, one part on the other, and who worked meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes

from services.trainer.serving.pictures.panels import draw_marks, finish, new_figure, save
from services.trainer.serving.pictures.points import Point

PARTS: Mapping[str, str] = {
    "time/wait_seconds": "#c7c7c7",
    "time/fetch_seconds": "#8dd3c7",
    "time/log_probs_seconds": "#bebada",
    "time/forward_seconds": "#80b1d3",
    "time/backward_seconds": "#1f78b4",
    "time/optimizer_seconds": "#b3de69",
    "time/critic_seconds": "#cab2d6",
    "time/publish_seconds": "#fdb462",
    "time/save_seconds": "#fb8072",
    "time/evaluate_seconds": "#ffed6f",
}
"""What follows each other in a step, and its colour."""
_LABELS: Mapping[str, str] = {"time/wait_seconds": "generation", "time/log_probs_seconds": "log-probs"}
"""The trainer waits for generation. Others have their metric's name."""

_WHOLE, _REST = "time/step_seconds", "time/other_seconds"
_BUSY = {"busy/engines": "#33a02c", "busy/trainer": "#1f78b4"}
DRAWN = (*PARTS, _WHOLE, *_BUSY)
"""The metrics in the picture."""


def draw_timeline(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG: a bar a point, in which what is not one of PARTS is `other`, and below it the busy shares.

    A part is one shape and not one for each bar: each takes kilobytes.
    """
    steps = [point for point in points if _WHOLE in point]
    if not steps:
        return
    figure = new_figure(points, path, (12, 6.8))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_parts(above, steps)
    _draw_shares(below, steps)
    draw_marks([above, below], steps)
    save(figure, path)


def _draw_parts(axes: Axes, steps: Sequence[Point]) -> None:
    parts = {name: [point.sums.get(name, 0.0) for point in steps] for name in PARTS}
    whole = [point.sums[_WHOLE] for point in steps]
    known = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts[_REST] = [max(all_ - some, 0.0) for all_, some in zip(whole, known, strict=True)]
    between = ((one.last + other.first) / 2 for one, other in pairwise(steps))
    edges = [steps[0].first - 0.5, *between, steps[-1].last + 0.5]
    bottom = [0.0] * len(steps)
    for name, seconds in parts.items():
        if any(seconds):
            part = _LABELS.get(name, name.removeprefix("time/").removesuffix("_seconds"))
            label = f"{part}: {sum(seconds) / sum(whole):.0%}"
            means = (total / point.nums[_WHOLE] for total, point in zip(seconds, steps, strict=True))
            top = [below + more for below, more in zip(bottom, means, strict=True)]
            axes.stairs(top, edges, baseline=bottom, fill=True, label=label, color=PARTS.get(name, "#eeeeee"))
            bottom = top
    finish(axes, "seconds of a step, and each part's share of all steps", steps, legend=None)
    axes.set_xlabel("")
    _explain(axes, reverse=True)


def _draw_shares(axes: Axes, steps: Sequence[Point]) -> None:
    for name, colour in _BUSY.items():
        if known := [point for point in steps if name in point]:
            share = sum(point.sums[name] for point in known) / sum(point.nums[name] for point in known)
            label = f"{name.removeprefix('busy/')}: {share:.0%}"
            places, shares = [point.step for point in known], [point.mean(name) for point in known]
            axes.plot(places, shares, marker="." if len(known) <= 100 else None, label=label, color=colour)
    axes.set_ylim(0, 1.05)
    finish(axes, "busy share", steps, legend=None)
    if axes.get_legend_handles_labels()[0]:
        _explain(axes)


def _explain(axes: Axes, *, reverse: bool = False) -> None:
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=reverse)
