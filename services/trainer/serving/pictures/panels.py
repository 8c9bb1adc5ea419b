"""The look that a run's pictures share: title, panels, lines, legends and the marks of what changed on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.disk.whole_file import replacing
from services.trainer.serving.pictures.points import Mark, Point

COLOURS = ("#1f5fa8", "#e0792b", "#3a923a", "#b04a9e", "#8c6d31", "#7f7f7f", "#17a2b8", "#c23b3b")
_MARKS: Mapping[str, str] = {"restart": "#777777", "changed": "#d1495b", "scorer": "#7b4fa3"}
_MARK_CHARACTERS = 150
_MOST_LINES = 8
"""Of text below the panels; other marks have a number alone."""
_MOST_INSIDE = 4
"""Labels of a legend that lies in its panel; a longer one is beside it."""
_NEAR = 0.02
"""Marks within this share of the picture's width have one number."""
_MARKERS_UP_TO = 60
_DECADES = 100.0
"""Positive values that span more than this factor have a logarithmic axis."""


def new_figure(points: Sequence[Point], path: Path, size: tuple[float, float]) -> Figure:
    """A figure with the run's name, which is its folder's, and the time that the points are from."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    times = [time for point in points for time in point.times]
    parts = [path.absolute().parent.name, *([_period(min(times), max(times))] if times else [])]
    figure.suptitle("   ".join(parts), x=0.01, ha="left", fontsize="large", fontweight="bold")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG, whole or not at all."""
    with replacing(path) as draft:
        figure.savefig(draft, dpi=110)


def line(points: Sequence[Point], metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of those that have a finite one."""
    having = [(point.step, point.mean(metric)) for point in points if metric in point]
    having = [(step, value) for step, value in having if math.isfinite(value)]
    return [step for step, _ in having], [value for _, value in having]


def draw_line(axes: Axes, points: Sequence[Point], metric: str, label: str, colour: str, *, is_main: bool) -> None:
    """The main line of a panel lies in front of the others."""
    steps, values = line(points, metric)
    axes.plot(
        steps,
        values,
        label=label,
        color=colour,
        linewidth=1.8 if is_main else 1.1,
        alpha=1.0 if is_main else 0.75,
        marker="o" if len(steps) <= _MARKERS_UP_TO else None,
        markersize=3,
        zorder=3 if is_main else 2,
    )


def draw_evaluations(axes: Axes, points: Sequence[Point], names: Sequence[str]) -> None:
    """Each data set's mean, with its 95 % interval as a band."""
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        draw_line(axes, points, f"eval/{name}", name, colour, is_main=True)
        both = [point for point in points if f"eval_low/{name}" in point and f"eval_high/{name}" in point]
        steps, lows = line(both, f"eval_low/{name}")
        _, highs = line(both, f"eval_high/{name}")
        if len(steps) == 1:  # a band has no width there
            axes.vlines(steps, lows, highs, color=colour, alpha=0.4)
        elif steps:
            axes.fill_between(steps, lows, highs, alpha=0.18, color=colour, linewidth=0)


def finish(axes: Axes, title: str, points: Sequence[Point], *, legend: str | None = "above") -> None:
    """Title, legend ("above" or "inside" the panel, or None), grid and the step axis, the same for all panels."""
    axes.set_title(title, loc="left", fontsize="medium", pad=8)
    axes.set_xlabel("step", fontsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    first, last = min(point.first for point in points), max(point.last for point in points)
    margin = 0.5 + 0.01 * (last - first)
    axes.set_xlim(first - margin, last + margin)
    axes.tick_params(labelsize="small")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend == "above":
        axes.legend(fontsize="small", frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.02), ncols=3)
    elif legend == "inside" and len(axes.get_legend_handles_labels()[0]) <= _MOST_INSIDE:
        axes.legend(fontsize="small", framealpha=0.7, edgecolor="none", loc="best")
    elif legend == "inside":
        axes.legend(fontsize="x-small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def use_log_axis(axes: Axes) -> None:
    """Makes the vertical axis logarithmic where all values are positive and span more than two decades."""
    values = np.concatenate([np.asarray(each.get_ydata(), dtype=float) for each in axes.get_lines()])
    if len(values) and min(values) > 0 and max(values) >= _DECADES * min(values):
        axes.set_yscale("log")


def draw_marks(panels: Sequence[Axes], points: Sequence[Point]) -> None:
    """A vertical line before each step at which something changed, with a number, and below the panels what it was."""
    steps = [point.step for point in points]
    near = _NEAR * (max(steps) - min(steps)) if steps else 0.0
    groups: list[list[Mark]] = []
    for mark in sorted({mark for point in points for mark in point.marks}, key=lambda mark: mark.step):
        if groups and mark.step - groups[-1][0].step <= near:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for axes in panels:
        for number, group in enumerate(groups, start=1):
            _draw_mark(axes, group[0].step - 0.5, str(number), _colour(group))
    lines = _lines(groups)
    figure = panels[0].figure
    if lines and isinstance(figure, Figure):
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="small", color="#444444")


def _lines(groups: Sequence[Sequence[Mark]]) -> list[str]:
    """Where there is no room for all, those that are more than a restart come first."""
    numbered = list(enumerate(groups, start=1))
    if len(numbered) > _MOST_LINES:
        numbered = sorted(numbered, key=lambda entry: (_colour(entry[1]) == _MARKS["restart"], -entry[0]))
        numbered = sorted(numbered[: _MOST_LINES - 1], key=lambda entry: entry[0])
    lines = [f"{number}  before step {group[0].step}: {_text(group)}" for number, group in numbered]
    return [*lines, f"… and {len(groups) - len(lines)} others"] if len(lines) < len(groups) else lines


def _draw_mark(axes: Axes, place: float, number: str, colour: str) -> None:
    axes.axvline(place, color=colour, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8, zorder=1)
    axes.annotate(
        number,
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="center",
        fontsize="x-small",
        color="white",
        zorder=4,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"},
    )


def _colour(group: Sequence[Mark]) -> str:
    texts = [mark.text for mark in group]
    if any(text.startswith("scorer") for text in texts):
        return _MARKS["scorer"]
    return _MARKS["changed" if any("->" in text for text in texts) else "restart"]


def _text(group: Sequence[Mark]) -> str:
    counts = Counter(mark.text for mark in group)
    text = "; ".join(f"{text} ×{count}" if count > 1 else text for text, count in counts.items()).replace("->", "→")
    return text if len(text) <= _MARK_CHARACTERS else f"{text[: _MARK_CHARACTERS - 1]}…"


def _period(first: float, last: float) -> str:
    began, ended = datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(last, UTC)
    until = f"{ended:%H:%M}" if began.date() == ended.date() else f"{ended:%Y-%m-%d %H:%M}"
    return f"{began:%Y-%m-%d %H:%M}" + ("" if f"{began:%Y-%m-%d %H:%M}".endswith(until) else f" to {until}") + " UTC"
