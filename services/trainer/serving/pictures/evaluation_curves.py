"""The picture of a run's evaluations: each data set's mean with its 95 % interval, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.trainer.serving.pictures import panels
from services.trainer.serving.pictures.points import Point

_MEAN, _PASS, _LOW, _HIGH = "eval/", "eval_pass/", "eval_low/", "eval_high/"
DRAWN = (_MEAN, _PASS, _LOW, _HIGH)
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
    figure = panels.new_figure(points, path, (12 if passes else 7, 4.4))
    means = figure.add_subplot(1, 2 if passes else 1, 1)
    panels.draw_evaluations(means, evaluations, names)
    panels.finish(means, "mean reward with its 95 % interval", points, legend="inside")
    drawn = [means]
    if passes:
        shares = figure.add_subplot(1, 2, 2)
        for number, metric in enumerate(passes):
            colour = panels.COLOURS[number % len(panels.COLOURS)]
            panels.draw_line(shares, evaluations, metric, metric.removeprefix(_PASS), colour, is_main=True)
        shares.set_ylim(-0.02, 1.02)
        panels.finish(shares, "pass@k", points, legend="inside")
        drawn.append(shares)
    panels.draw_marks(drawn, points)
    panels.save(figure, path)
