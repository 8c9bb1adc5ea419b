"""`python -m tools.quickstart_picture RUN`: draws docs/quickstart.svg for README from a run of the quickstart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from headrace.cli.commands.init import before_and_after
from headrace.run_folder import RunFolder, fields_in
from headrace.sample_log import Answer

PICTURE = Path(__file__).parents[1] / "docs" / "quickstart.svg"
_ROWS = 6
_BLUE, _ORANGE, _GREEN, _RED, _GRAY = "#2563eb", "#f59e0b", "#15803d", "#b91c1c", "#6b7280"
_COLUMNS = (0.0, 0.30, 0.66)


def draw(run: RunFolder) -> Figure:
    """Left the curves, right what the same prompts were answered before and after."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    FigureCanvasSVG(figure)
    curves, table = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _curves(curves, list(fields_in(run.metrics)))
    _table(table, before_and_after(run, _ROWS))
    return figure


def _curves(axes: Axes, rows: Sequence[dict[str, float]]) -> None:
    trained = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    evaluated = [(row["step"], row["eval/sums"]) for row in rows if "eval/sums" in row]
    axes.plot(*zip(*trained, strict=True), color=_ORANGE, linewidth=1.6, label="training, sampled")
    axes.plot(*zip(*evaluated, strict=True), color=_BLUE, linewidth=2, marker="o", label="new prompts")
    for (step, value), offset in ((evaluated[0], 8), (evaluated[-1], -16)):
        axes.annotate(f"{value:.2f}", (step, value), (0, offset), textcoords="offset points", ha="center", color=_BLUE)
    axes.set(xlabel="step", ylim=(0, 1.1))
    axes.set_title("share of exact results", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")


def _table(axes: Axes, pairs: Sequence[tuple[Answer, Answer]]) -> None:
    axes.set_axis_off()
    axes.set_title("the same new prompts, before and after", loc="left", fontsize=11)
    top, height = 0.92, 0.92 / (_ROWS + 1)
    for x, word in zip(_COLUMNS, ("prompt", "before", "after"), strict=True):
        axes.text(x, top, word, color=_GRAY, fontsize=9.5, transform=axes.transAxes)
    for number, (before, after) in enumerate(pairs, 1):
        y = top - number * height
        axes.axhline(y + 0.65 * height, color=_GRAY, alpha=0.2, linewidth=0.8)
        cells = ((before.prompt.splitlines()[-1], "black"), *((_text(each), _color(each)) for each in (before, after)))
        for x, (text, color) in zip(_COLUMNS, cells, strict=True):
            axes.text(x, y, text, color=color, family="monospace", fontsize=10, transform=axes.transAxes)


def _text(answer: Answer) -> str:
    return " ".join(answer.response.split())[:16] or "(nothing)"


def _color(answer: Answer) -> str:
    return _GREEN if answer.reward else _RED


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "headrace"  # the same bytes for the same run
    draw(RunFolder(Path(sys.argv[1]))).savefig(PICTURE, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
