"""`headrace samples`: of a run that lives and of one that has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Failure
from tests.support.ledgers.answers import answered

MEGABYTE = 1 << 20


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Three steps of two samples, and one that failed."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    run.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    log = SampleLog(run.samples)
    for step in (1, 2, 3):
        answers = [
            Answer.of(
                answered(f"g{step}/0", "apples and", f" pears {step}", group_id=f"g{step}", reward=step / 10), step
            ),
            Answer.of(answered(f"g{step}/1", "apples and", f" plums {step}", group_id=f"g{step}", reward=-step), step),
        ]
        log.write_step(step, 0, answers, MEGABYTE)
    failed = answered("g9/0", "apples and", " [bold]\x1b[2J", group_id="g9", failure=Failure("SCORER_RAISED", "'x'"))
    log.write_untrained(log.new_untrained_file(), [Answer.of(failed)], MEGABYTE)
    return run


def ids(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["samples", "--json", *words]) == 0
    return [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_has_ended_still_shows_its_samples(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "-n", "2", "one"]) == 0
    printed = capsys.readouterr().out
    assert "step 3, g3/0, completed, 3 + 2 tokens, policy version 1 [0:2]" in printed
    assert "prompt:\napples and\nresponse:\n pears 3\nreward 0.3 by math 7" in printed
    assert "step 2" not in printed
    assert "1 samples failed" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "2"], ["g2/0", "g2/1"]),
        (["--group", "g1"], ["g1/0", "g1/1"]),
        (["--best", "-n", "2"], ["g3/0", "g2/0"]),
        (["--worst", "-n", "1"], ["g3/1"]),
        (["--search", "PLUMS 1"], ["g1/1"]),
        (["--failed"], ["g9/0"]),
        (["--step", "7"], []),
    ],
)
def test_samples_by_step_group_reward_and_text(
    words: list[str], expected: list[str], ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids(capsys, *words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--eval"], ["e4/sums", "e4/aime", "e0/sums"]),
        (["--eval", "sums"], ["e4/sums", "e0/sums"]),
        (["--eval", "--step", "0"], ["e0/sums"]),
        (["--eval", "sums", "--best", "-n", "1"], ["e4/sums"]),
        ([], ["g3/0", "g3/1", "g2/0", "g2/1", "g1/0"]),
    ],
)
def test_the_samples_of_evaluations_are_shown_by_step_and_data_set(
    words: list[str], expected: list[str], ended: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SampleLog(ended.samples)
    for step, names in ((0, ["sums"]), (4, ["sums", "aime"])):
        answers = [
            Answer.of(answered(f"e{step}/{name}", group_id=f"eval/{name}/0", reward=float(step)), step)
            for name in names
        ]
        log.write_evaluated(step, answers, MEGABYTE, is_new=True)
    assert ids(capsys, *words) == expected


def test_what_is_not_there_is_said(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--step", "7"]) == 0
    assert "no such sample in runs/one: steps 1 to 3 have samples" in capsys.readouterr().out


def test_a_model_cannot_steer_the_terminal(ended: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--failed"]) == 0
    printed = capsys.readouterr().out
    assert "[bold]␛[2J" in printed
    assert "\x1b" not in printed
    assert "failed: SCORER_RAISED: 'x'" in printed
