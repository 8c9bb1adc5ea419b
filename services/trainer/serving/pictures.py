"""The pictures of a run: its curves, its evaluations, and where each step's time went.

A picture of a million steps has no more points than one of a thousand, in memory, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.disk import atomic_write

MOST_POINTS = 500
"""A picture is some 1,300 pixels wide."""
_MOST_MARKS = 20
"""Of one point: a run that restarts all the time would fill the memory otherwise."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What changed before a step: a restart, with the options that it changed, or another scorer."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """Neighbouring rows of the report: how many they are, from which step to which, and their metrics."""

    first: int
    last: int
    num_rows: int
    sums: Mapping[str, float]
    nums: Mapping[str, int]
    """How many of the rows have the metric."""
    times: Sequence[float] = ()
    """When the first and the last of them came, in seconds since 1970; empty where nobody knows."""
    marks: Sequence[Mark] = ()

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2

    def __contains__(self, metric: str) -> bool:
        return metric in self.sums

    def mean(self, metric: str) -> float:
        return self.sums[metric] / self.nums[metric]

    def joined(self, later: Point) -> Point:
        sums = dict(self.sums)
        for name, value in later.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        nums = dict(Counter(self.nums) + Counter(later.nums))
        first, last = min(self.first, later.first), max(self.last, later.last)
        times = [*self.times, *later.times]
        times = [min(times), max(times)] if times else []
        marks = [*self.marks, *later.marks][-_MOST_MARKS:]
        return Point(first, last, self.num_rows + later.num_rows, sums, nums, times, marks)


class Points:
    """Keeps at most `most` points of all rows so far: when there would be more, neighbours are joined.

    All have the same number of rows, but for the last, which may have fewer.
    """

    def __init__(self, metrics: Sequence[str], most: int = MOST_POINTS) -> None:
        """`metrics` are what the names of metrics begin with; others are left out, and so are rows without any."""
        self._starts = tuple(metrics)
        self._most = most
        self._points: list[Point] = []
        self._rows_per_point = 1

    def add(
        self, step: int, metrics: Mapping[str, float], time: float | None = None, marks: Sequence[str] = ()
    ) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith(self._starts)}
        if not found:
            return
        times = () if time is None else (time, time)
        point = Point(step, step, 1, found, dict.fromkeys(found, 1), times, [Mark(step, text) for text in marks])
        if self._points and self._points[-1].num_rows < self._rows_per_point:
            self._points[-1] = self._points[-1].joined(point)
            return
        self._points.append(point)
        if len(self._points) > self._most:
            self._halve()

    def all(self) -> list[Point]:
        return list(self._points)

    def _halve(self) -> None:
        pairs = (self._points[i : i + 2] for i in range(0, len(self._points), 2))
        self._points = [pair[0].joined(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]
        self._rows_per_point *= 2


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
    with atomic_write(path) as draft:
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


def plot_evaluations(axes: Axes, points: Sequence[Point], names: Sequence[str]) -> None:
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


_EVALUATION = "eval/"
_POLICY_LOSS, _RATIO = "loss/policy", "ratio/std"
_PANELS: Mapping[str, Mapping[str, str]] = {
    "reward": {"reward/all/mean": "all scored samples", "reward/mean": "trained samples"},
    "response tokens": {"response_length/mean": "mean"},
    "loss": {_POLICY_LOSS: "policy", "loss/sft": "negative log-likelihood", "loss/kl": "KL to the start"},
    "gradient norm": {"grad_norm": "before clipping"},
    "|log-prob trainer − engine|": {"log_prob_diff/mean": "mean", "log_prob_diff/max": "max"},
}
"""Title → metric → label, the main line first."""
_ON_LOG_AXES = ("loss", "gradient norm", "|log-prob trainer − engine|")
_TINY = 1e-6
CURVES = (
    *(metric for metrics in _PANELS.values() for metric in metrics),
    _RATIO,
    _EVALUATION,
    "eval_low/",
    "eval_high/",
)
"""Beginnings of the names of the metrics in the picture."""


def draw_curves(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG with a panel for each group of metrics that the run has."""
    names = {name for point in points for name in point.sums}
    if _is_zero_by_construction(points):
        names.discard(_POLICY_LOSS)
    sets = sorted(name.removeprefix(_EVALUATION) for name in names if name.startswith(_EVALUATION))
    panels: dict[str, Sequence[str]] = {
        title: [metric for metric in metrics if metric in names] for title, metrics in _PANELS.items()
    }
    panels = {title: metrics for title, metrics in panels.items() if metrics}
    titles = [*(["reward"] if "reward" in panels else []), *(["evaluation"] if sets else [])]
    titles += [title for title in panels if title != "reward"]
    num_rows = max((len(titles) + 1) // 2, 1)
    figure = new_figure(points, path, (12, 0.5 + 3.0 * num_rows))
    grid = figure.add_gridspec(num_rows, 2)
    drawn: list[Axes] = []
    is_odd = len(titles) % 2  # then the first panel has a row to itself
    for number, title in enumerate(titles):
        place = number + is_odd
        axes = figure.add_subplot(grid[0, :] if is_odd and number == 0 else grid[place // 2, place % 2])
        if title == "evaluation":
            plot_evaluations(axes, sorted(points, key=lambda point: point.step), sets)
            finish(axes, "evaluation: mean reward with its 95 % interval", points, legend="inside")
        else:
            _draw(axes, points, title, panels[title])
            finish(axes, title, points)
        drawn.append(axes)
    if drawn:
        draw_marks(drawn, points)
    save(figure, path)


def _draw(axes: Axes, points: Sequence[Point], title: str, metrics: Sequence[str]) -> None:
    for number, metric in enumerate(metrics):
        draw_line(axes, points, metric, _PANELS[title][metric], COLOURS[number], is_main=number == 0)
    if title in _ON_LOG_AXES:
        use_log_axis(axes)


def _is_zero_by_construction(points: Sequence[Point]) -> bool:
    """True where every loss is 0, and where no policy moved away from the one that its batch was sampled with."""
    losses, ratios = line(points, _POLICY_LOSS)[1], line(points, _RATIO)[1]
    return all(abs(loss) <= _TINY for loss in losses) or (bool(ratios) and max(ratios) <= _TINY)


_MEAN, _PASS, _LOW, _HIGH = "eval/", "eval_pass/", "eval_low/", "eval_high/"
EVALUATIONS = (_MEAN, _PASS, _LOW, _HIGH)
"""Beginnings of the names of the metrics in the picture."""


def draw_evaluations(points: Sequence[Point], path: Path) -> None:
    """Writes a PNG, if there is an evaluation with a result."""
    evaluations = sorted(
        (point for point in points if any(name.startswith(_MEAN) for name in point.sums)), key=lambda point: point.step
    )
    if not evaluations:
        return
    metrics = sorted({name for point in evaluations for name in point.sums})
    names = [name.removeprefix(_MEAN) for name in metrics if name.startswith(_MEAN)]
    passes = [name for name in metrics if name.startswith(_PASS) and not name.endswith("@1")]
    figure = new_figure(points, path, (12 if passes else 7, 4.4))
    means = figure.add_subplot(1, 2 if passes else 1, 1)
    plot_evaluations(means, evaluations, names)
    finish(means, "mean reward with its 95 % interval", points, legend="inside")
    drawn = [means]
    if passes:
        shares = figure.add_subplot(1, 2, 2)
        for number, metric in enumerate(passes):
            colour = COLOURS[number % len(COLOURS)]
            draw_line(shares, evaluations, metric, metric.removeprefix(_PASS), colour, is_main=True)
        shares.set_ylim(-0.02, 1.02)
        finish(shares, "pass@k", points, legend="inside")
        drawn.append(shares)
    draw_marks(drawn, points)
    save(figure, path)


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
TIMELINE = (*PARTS, _WHOLE, *_BUSY)
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
    _explain_timeline(axes, reverse=True)


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
        _explain_timeline(axes)


def _explain_timeline(axes: Axes, *, reverse: bool = False) -> None:
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=reverse)
