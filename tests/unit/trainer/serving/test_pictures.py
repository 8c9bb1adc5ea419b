"""The pictures of a run: their cost does not grow with its steps, and one that is slow is not asked for twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from services.trainer.serving import report as report_module
from services.trainer.serving.curves import draw_curves
from services.trainer.serving.points import MOST_POINTS, averaged
from services.trainer.serving.report import RunReport
from services.trainer.serving.row import MetricsRow
from services.trainer.serving.timeline import PARTS, draw_timeline

Draw = Callable[[Sequence[MetricsRow], Path], None]


def rows(count: int) -> list[MetricsRow]:
    metrics = dict.fromkeys(PARTS, 1.0) | {"time/step_seconds": 12.0, "busy/trainer": 0.5, "reward/mean": 0.1}
    return [MetricsRow(step, 0.0, metrics) for step in range(1, count + 1)]


@pytest.mark.parametrize("draw", [draw_timeline, draw_curves])
def test_a_picture_has_as_many_shapes_and_points_of_many_steps_as_of_few(
    draw: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, points = list[int](), list[int]()

    def counted(figure: Figure, draft: Path, **_: object) -> None:
        shapes.append(len(figure.findobj()))
        points.append(max(np.asarray(line.get_xdata()).size for line in figure.findobj(Line2D)))
        draft.touch()

    monkeypatch.setattr(Figure, "savefig", counted)
    for count in (MOST_POINTS, 2 * MOST_POINTS):
        draw(rows(count), tmp_path / "picture.png")
    few, many = shapes
    assert many < 1.5 * few
    assert few < 1000  # each takes kilobytes
    assert points == [MOST_POINTS, MOST_POINTS]


def test_the_parts_of_a_long_runs_steps_lie_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Sequence[float], Sequence[float], Sequence[float]]] = []
    stairs = Axes.stairs

    def noted(
        axes: Axes, top: Sequence[float], edges: Sequence[float], *, baseline: Sequence[float], **how: Any
    ) -> Any:
        drawn.append((baseline, top, edges))
        return stairs(axes, top, edges, baseline=baseline, **how)

    monkeypatch.setattr(Axes, "stairs", noted)
    monkeypatch.setattr(Figure, "savefig", lambda _, draft, **__: draft.touch())
    draw_timeline(rows(3 * MOST_POINTS), tmp_path / "timeline.png")
    assert [list(baseline) for baseline, _, _ in drawn[1:]] == [list(top) for _, top, _ in drawn[:-1]]
    _, top, edges = drawn[-1]
    assert len(drawn) == len(PARTS) + 1
    assert set(top) == {12.0}
    assert (edges[0], edges[-1], len(edges)) == (0.5, 3 * MOST_POINTS + 0.5, MOST_POINTS + 1)


def test_neighbours_have_one_mean_where_there_are_too_many() -> None:
    assert averaged([]) == []
    assert averaged([1.0, 2.0, 3.0], most=3) == [1.0, 2.0, 3.0]
    assert averaged([1.0, 2.0, 3.0, 5.0, 9.0], most=3) == [1.5, 4.0, 9.0]
    assert len(averaged(range(1_000_001))) <= MOST_POINTS


def test_pictures_that_are_being_drawn_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, drawn = threading.Event(), list[int]()

    def slow(found: Sequence[MetricsRow], _: Path) -> None:
        drawn.append(len(found))
        assert going_on.wait(60)

    monkeypatch.setattr(report_module, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(report_module, "_PICTURES", {"curves": slow})
    report = RunReport(tmp_path)
    report.resume(0)
    for step in (1, 2, 3):
        report.write(step, {"loss": 1.0})
    going_on.set()
    while len(drawn) < 2:
        report.write(len(report.rows) + 1, {"loss": 1.0})
        time.sleep(0.001)
    assert drawn[0] == 1
    assert drawn[1] > 3
    report.close()
    assert drawn[-1] == len(report.rows)
