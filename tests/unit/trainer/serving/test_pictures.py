"""The pictures of a run: their cost does not grow with its steps, and one that is slow is not asked for twice."""

from __future__ import annotations

import itertools
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
from services.trainer.serving.pictures.curves import draw_curves
from services.trainer.serving.pictures.points import MOST_POINTS, Point, Points
from services.trainer.serving.pictures.timeline import PARTS, draw_timeline
from services.trainer.serving.report import RunReport

Draw = Callable[[Sequence[Point], Path], None]


def points(count: int) -> list[Point]:
    metrics = dict.fromkeys(PARTS, 1.0) | {"time/step_seconds": 12.0, "busy/trainer": 0.5, "reward/mean": 0.1}
    found = Points([""])
    for step in range(1, count + 1):
        found.add(step, metrics)
    return found.all()


@pytest.mark.parametrize("draw", [draw_timeline, draw_curves])
def test_a_picture_has_as_many_shapes_and_points_of_many_steps_as_of_few(
    draw: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, shown = list[int](), list[int]()

    def counted(figure: Figure, draft: Path, **_: object) -> None:
        shapes.append(len(figure.findobj()))
        shown.append(max(np.asarray(line.get_xdata()).size for line in figure.findobj(Line2D)))
        draft.touch()

    monkeypatch.setattr(Figure, "savefig", counted)
    for count in (MOST_POINTS, 2 * MOST_POINTS):
        draw(points(count), tmp_path / "picture.png")
    few, many = shapes
    assert many < 1.5 * few
    assert few < 1000  # each takes kilobytes
    assert shown == [MOST_POINTS, MOST_POINTS]


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
    draw_timeline(points(3 * MOST_POINTS), tmp_path / "timeline.png")
    assert [list(baseline) for baseline, _, _ in drawn[1:]] == [list(top) for _, top, _ in drawn[:-1]]
    _, top, edges = drawn[-1]
    assert len(drawn) == len(PARTS) + 1
    assert set(top) == {12.0}
    assert (edges[0], edges[1], edges[-1], len(edges)) == (0.5, 4.5, 3 * MOST_POINTS + 0.5, len(top) + 1)


def test_neighbours_are_joined_where_there_are_too_many() -> None:
    found = Points(["a", "b"], most=2)
    for step, metrics in enumerate([{"a": 1.0}, {"c": 1.0}, {"a": 2.0, "b": 7.0}, {"a": 6.0}, {"a": 8.0}, {"a": 9.0}]):
        found.add(step, metrics)
    first, last = found.all()
    assert (first.first, first.last, first.num_rows, first.mean("a"), first.mean("b")) == (0, 4, 4, 17.0 / 4, 7.0)
    assert (last.step, last.mean("a"), "b" in last, "c" in first) == (5.0, 9.0, False, False)


def test_of_a_million_steps_there_are_no_more_points() -> None:
    found = Points([""], most=8)
    for step in range(10_000):
        found.add(step, {"a": float(step)})
        assert len(found.all()) <= 8
    assert sum(point.num_rows for point in found.all()) == 10_000
    assert all(point.mean("a") == point.step for point in found.all())


def test_pictures_that_are_being_drawn_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, drawn = threading.Event(), list[int]()

    def slow(found: Sequence[Point], _: Path) -> None:
        drawn.append(sum(point.num_rows for point in found))
        assert going_on.wait(60)

    monkeypatch.setattr(report_module, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(report_module, "_PICTURES", {"curves": slow})
    report = RunReport(tmp_path)
    report.resume(0)
    steps = itertools.count(1)
    for _ in range(3):
        report.write(next(steps), {"loss/sft": 1.0})
    going_on.set()
    while len(drawn) < 2:
        report.write(next(steps), {"loss/sft": 1.0})
        time.sleep(0.001)
    assert drawn[0] == 1
    assert drawn[1] > 3
    report.close()
    assert drawn[-1] == next(steps) - 1
