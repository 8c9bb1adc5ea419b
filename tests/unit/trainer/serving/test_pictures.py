"""The pictures of a run: their cost does not grow with its steps, and one that is slow is not asked for twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from headrace.job.schema.job import Job
from headrace.run_folder import RunFolder
from services.trainer.control.build import TrainerBuild
from services.trainer.serving.pictures import MOST_POINTS, PARTS, Point, Points, draw_curves, draw_timeline
from services.trainer.serving.report import RunReport

Rows = Sequence[dict[str, float]]
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


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """File name → the figure that was saved last, in place of its pixels."""
    saved: dict[str, Figure] = {}

    def kept(figure: Figure, draft: Path, **_: object) -> None:
        saved[next(name for name in ("curves", "timeline", "evaluations") if name in draft.name)] = figure
        draft.touch()

    monkeypatch.setattr(Figure, "savefig", kept)
    return saved


def report_of(folder: Path, rows: Rows, *, from_step: int = 0) -> None:
    report = RunReport(folder)
    report.resume(from_step)
    for step, metrics in enumerate(rows, start=from_step + 1):
        report.write(step, metrics)
    report.close()


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


STEP = {"reward/mean": 0.5, "grad_norm": 1.0}


def test_a_restart_is_marked_in_all_pictures_before_its_first_step(tmp_path: Path, figures: dict[str, Figure]) -> None:
    restarts = (1, 2, 9)
    rows = [STEP | {"time/step_seconds": 1.0}] * 12
    for step in (0, *restarts):  # each start trains more than its checkpoint keeps
        report_of(tmp_path, rows, from_step=step)
    for name in ("curves", "timeline"):
        told = texts(figures[name])
        assert [f"before step {step + 1}: restart" in told for step in restarts] == [True] * len(restarts)
        for axes in figures[name].axes:
            upright = [np.asarray(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "--"]
            assert sorted({float(where[0]) for where in upright}) == [step + 0.5 for step in restarts]


def test_a_start_that_changes_an_option_is_marked_with_it_and_secrets_are_not_shown(
    tmp_path: Path, figures: dict[str, Figure]
) -> None:
    changes = ({"megatron": {"lr": lr}, "sglang": {"api_key": key}} for lr, key in ((1e-6, "sk-old"), (2e-6, "sk-new")))
    for number, sections in enumerate(changes):
        job = Job.model_validate({"model": {"hf_checkpoint": "/none"}, **sections})
        report = TrainerBuild(job, tmp_path).report()
        RunFolder(tmp_path).create(job)  # as its launcher does once all is ready
        report.resume(2)
        for step in (1, 2):
            report.write(2 * number + step, STEP)
        report.close()
    assert "before step 3: restart: " in texts(figures["curves"])
    assert "lr 1e-6 → 2e-6" in texts(figures["curves"])
    assert "sk-" not in texts(figures["curves"])
