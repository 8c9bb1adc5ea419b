"""`headrace eval --history`: steps by data sets, and the picture of the same rows."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from headrace.cli.main import main
from headrace.run_folder import RunFolder
from services.trainer.serving.pictures import Point, draw_evaluations
from services.trainer.serving.report import RunReport


def result(mean: float, first: int, last: int) -> dict[str, float]:
    return {
        "eval_error": 0.0, "eval/sums": mean, "eval_low/sums": mean - 0.1, "eval_high/sums": mean + 0.1,
        "eval_pass/sums@1": mean, "eval_pass/sums@8": 0.875,
        "eval_min_version/sums": first, "eval_max_version/sums": last,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    run.write_services({})
    return run


async def test_evaluations_are_shown_by_step_and_data_set_with_intervals_and_versions(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RunReport(run.path)
    report.write(7, {"reward/mean": 0.5})
    report.write(5, result(0.5, 5, 7))
    report.write(0, result(0.25, 0, 0) | {"eval/aime": 0.125})
    report.write(10, {"eval_error": 1.0}, ["the evaluation failed, UNAVAILABLE: nobody [is] there"])
    report.close()
    assert main(["eval", "--history", "one"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "aime", "sums", "versions"]
    assert lines[1] == ["0", "0.125", "0.250", "[0.150,", "0.350]", "@8", "0.875", "0"]
    assert lines[2] == ["5", "–", "0.500", "[0.400,", "0.600]", "@8", "0.875", "5", "to", "7"]
    assert lines[3] == ["10", "–", "–", "no", "result"]
    assert " ".join(lines[4]) == "the evaluation failed, UNAVAILABLE: nobody [is] there"
    assert "evaluations.png has the curves" in " ".join(lines[5])


def test_a_run_without_evaluations_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--history", "one"]) != 0
    assert "has no evaluation yet" in capsys.readouterr().err


def test_the_picture_has_each_data_set_with_its_interval(tmp_path: Path) -> None:
    points = [Point.of(step, result(mean, step, step)) for step, mean in ((0, 0.2), (5, 0.8))]
    draw_evaluations(points, tmp_path / "with.png")
    bare = [Point.of(point.first, {"eval/sums": point.mean("eval/sums")}) for point in points]
    draw_evaluations(bare, tmp_path / "bare.png")
    with_interval, without = (matplotlib.image.imread(str(tmp_path / f"{name}.png")) for name in ("with", "bare"))
    assert with_interval.shape[1] > without.shape[1], "pass@k has a panel of its own"
    draw_evaluations([Point.of(1, {"reward/mean": 1.0})], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
