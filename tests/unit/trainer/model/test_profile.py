"""Steps that PyTorch's profiler sees: which ones, and what a person opens afterwards."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from headrace.job.rules.rules import warnings
from headrace.job.schema.run import DebugSection
from services.trainer.megatron.parallel import Layout
from services.trainer.model.profile import StepProfiler


class Rank:
    """Of a CPU."""

    rank = 3
    device = torch.device("cpu")


LAYOUT: Layout = Rank()  # type: ignore[assignment]  # no other fact of it is asked for


def test_profile_steps_are_counted_from_one_without_the_last(tmp_path: Path) -> None:
    steps = DebugSection(profile_steps="2:4").profiled_steps
    profiler = StepProfiler(steps, tmp_path / "profile", LAYOUT)
    for number in range(1, 6):
        with profiler.step(number):
            torch.ones(64, 64) @ torch.ones(64, 64)
    files = sorted(file.name for file in (tmp_path / "profile").iterdir())
    assert files == ["step-0000002-rank-3.json.gz", "step-0000003-rank-3.json.gz"]
    with gzip.open(tmp_path / "profile" / files[0]) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    assert {"aten::matmul", "[memory]"} <= {event["name"] for event in events}


@pytest.mark.parametrize("text", ["", "3", "0:2", "4:4", "5:3", "a:b", "-1:2", "1:2:3", "1:"])
def test_what_is_no_range_of_steps_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValidationError, match="10:12"):
        DebugSection(profile_steps=text)


def test_a_disk_that_takes_no_profile_does_not_end_the_step(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    with StepProfiler(range(1, 2), tmp_path / "profile", LAYOUT).step(1):
        pass


def test_a_step_that_fails_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfiler(range(1, 2), tmp_path / "profile", LAYOUT).step(1):
        raise ZeroDivisionError
    assert not (tmp_path / "profile").exists()


def test_a_range_behind_the_last_step_is_warned_of(load_with) -> None:
    assert any(
        "profile_steps 9:10" in each for each in warnings(load_with("--profile-steps", "9:10", "--num-rollout", "8"))
    )
    assert warnings(load_with("--profile-steps", "8:10", "--num-rollout", "8")) == []
