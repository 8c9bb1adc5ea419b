"""`draw.py PICTURE RUN …`: mean rewards of all groups over the steps of several runs, one line a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ALL, TRAINED = "reward/all/mean", "reward/mean"


def rewards(run: Path) -> list[tuple[int, float]]:
    """Of each step, with the groups that the filter dropped."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get(ALL, row[TRAINED])) for row in rows if TRAINED in row]


def main(picture: Path, runs: list[Path]) -> None:
    """Writes an SVG, and says where each run began and ended."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for run in runs:
        found = rewards(run)
        axes.plot(*zip(*found, strict=True), marker="o", markersize=3, linewidth=1.2, label=run.name)
        first, last = (sum(r for _, r in some) / len(some) for some in (found[:2], found[-2:]))
        print(f"{run.name}: mean reward {first:.3f} in the first two steps, {last:.3f} in the last two")
    axes.set(xlabel="step", ylabel="mean reward of all groups", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
