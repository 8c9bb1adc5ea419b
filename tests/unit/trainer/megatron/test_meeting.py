"""Ranks that several machines started by themselves, each a process of its own, with something wrong on one of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.support.processes.training_run import ROOT

ENOUGH, LONGER, SHORT = 120.0, 15.0, 3.0
SLOW, FAST = {"train.lr": "0.1"}, {"train.lr": "0.2"}
MACHINES = (
    ("alike", 0, 2, SLOW, ENOUGH),
    ("alike", 1, 2, SLOW, ENOUGH),
    ("other job", 0, 3, SLOW, ENOUGH),
    ("other job", 1, 3, FAST, ENOUGH),
    ("other job", 2, 3, SLOW, ENOUGH),
    ("missing", 0, 3, SLOW, SHORT),
    ("missing", 1, 3, SLOW, LONGER),
    ("both first", 0, 2, SLOW, SHORT),
    ("both first", 0, 2, SLOW, SHORT),
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """What the machines of each meeting said at their ends; all meetings are at the same time."""
    folder = tmp_path_factory.mktemp("machines")
    words = (sys.executable, "-m", "tests.support.processes.machines_that_meet", str(folder), json.dumps(MACHINES))
    subprocess.run(words, cwd=ROOT, check=True, timeout=240)
    found: dict[str, list[str]] = {}
    for number, (meeting, *_) in enumerate(MACHINES):
        found.setdefault(meeting, []).append((folder / str(number)).read_text())
    return found


def test_machines_with_the_same_options_meet(said: Mapping[str, Sequence[str]]) -> None:
    assert said["alike"] == ["met", "met"]


def test_different_jobs_are_refused_on_every_machine_with_what_differs(said: Mapping[str, Sequence[str]]) -> None:
    for words in said["other job"]:
        assert words.startswith("ConfigError rank 1 was started with other options than rank 0")
        assert "train.lr 0.2 in place of 0.1: give all machines the same job" in words


def test_a_machine_that_never_comes_is_named_and_everybody_ends(said: Mapping[str, Sequence[str]]) -> None:
    """On a busy machine others may be late, too."""
    first, *others = said["missing"]
    assert re.match(r"DeadlineExceeded ranks \[(1, )?2\] are not at 127\.0\.0\.1:\d+ after 3 s", first)
    assert "on each machine with its own --node-rank" in first
    for words in others:
        assert words == first or re.match(r"Unavailable (rank 0|the ranks)", words)


def test_two_machines_that_both_say_they_are_the_first_are_told_so(said: Mapping[str, Sequence[str]]) -> None:
    waited, refused = sorted(said["both first"])
    assert waited.startswith("DeadlineExceeded ranks [1] are not at")
    assert refused.startswith("Unavailable 127.0.0.1")
    assert "is taken: end the process that listens there (another machine 0?)" in refused
