"""The soak's own parts: what a leak is, what noise is, and that processes are looked at. `make soak` is the whole."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.soak.report import draw, judged, table
from tests.soak.sampling import Lines, Sampling
from tests.soak.verdict import BOUNDS, MIB, judge

HOURS = 4.0
EVERY_SECONDS = 10.0


def line(an_hour: float, noise: float, seed: int = 0, hours: float = HOURS, level: float = 400.0) -> list:
    """Warm-up, a slope, noise, and outliers such as a garbage collector leaves."""
    random = np.random.default_rng(seed)
    seconds = np.arange(0, hours * 3600, EVERY_SECONDS)
    warm = 80 * (1 - np.exp(-seconds / (hours * 300)))
    values = level + warm + an_hour * seconds / 3600 + random.normal(0, noise, len(seconds))
    values[random.integers(0, len(seconds), len(seconds) // 20)] += 200
    return list(zip(seconds.tolist(), (values * MIB).tolist(), strict=True))


@pytest.mark.parametrize("an_hour", [16, 64, 1000])
def test_a_leak_is_found_and_its_rate_is_about_right(an_hour: float) -> None:
    verdict = judge(line(an_hour, noise=5), BOUNDS["memory"])
    assert verdict is not None
    assert verdict.grows
    assert verdict.slope / MIB == pytest.approx(an_hour, rel=0.2)


def test_a_line_that_flattens_only_in_the_second_half_grows() -> None:
    seconds = [float(i) for i in range(300)]
    late = [(one, 600 * MIB * (1 - 0.4 * math.exp(-one / 100))) for one in seconds]
    verdict = judge(late, BOUNDS["memory"])
    assert verdict is not None
    assert verdict.grows


def test_the_first_minute_of_a_process_is_its_warm_up() -> None:
    lines = Lines()
    lines.points["memory"] = [(150.0 + i, 100.0 * MIB * min(i, 60)) for i in range(150)]
    assert [each.verdict.grows for each in judged({("warms up", 1): lines}, 300.0)] == [False]
    lines.points["memory"] = [(150.0 + i, 100.0 * MIB * min(i, 140)) for i in range(150)]
    assert [each.verdict.grows for each in judged({("grows on", 1): lines}, 300.0)] == [True]


@pytest.mark.parametrize("noise", [0.0, 5.0, 40.0])
def test_warm_up_noise_and_outliers_are_no_leak(noise: float) -> None:
    verdicts = [judge(line(0, noise, seed), BOUNDS["memory"]) for seed in range(5)]
    assert not any(verdict is None or verdict.grows for verdict in verdicts)


@pytest.mark.parametrize(("quantity", "an_hour"), [("descriptors", 6), ("threads", 3)])
def test_one_more_of_them_now_and_then_is_a_leak_and_coming_and_going_is_not(quantity: str, an_hour: int) -> None:
    seconds = np.arange(0, HOURS * 3600, EVERY_SECONDS)
    coming = np.random.default_rng(1).integers(0, 6, len(seconds))
    for slope in (0, an_hour):
        values = np.floor(50 + coming + slope * seconds / 3600)
        verdict = judge(list(zip(seconds.tolist(), values.tolist(), strict=True)), BOUNDS[quantity])
        assert verdict is not None
        assert verdict.grows is (slope > 0)


async def test_real_processes_are_looked_at_judged_and_drawn(tmp_path: Path) -> None:
    code = (
        "import os, sys, threading\nos.dup(0)\nthreading.Thread(target=sys.stdin.read).start()\nprint('.', flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        await asyncio.to_thread(child.stdout.readline)
        (tmp_path / "file").write_bytes(bytes(100_000))
        sampling = Sampling()
        of_child = sampling.lines["child", child.pid].points
        last = 0.0
        while judge(of_child["memory"], BOUNDS["memory"]) is None:  # however long a look takes
            sampling.look({"child": child.pid}, {"folder": tmp_path})
            last = of_child["memory"][-1][0]
            await asyncio.sleep(0.005)
        assert of_child["memory"][-1][1] > MIB
        assert of_child["threads"][-1][1] == 2
        assert of_child["descriptors"][-1][1] == 4
        assert sampling.lines["folder", 0].points["disk"][-1][1] >= 100_000
        found = judged(sampling.lines, last)
        assert {(each.name, each.quantity) for each in found} == {
            *(("child", quantity) for quantity in ("memory", "descriptors", "threads")),
            ("folder", "disk"),
        }
        assert "GROWS" not in table(found)
        draw(sampling.lines, tmp_path / "soak.svg")
        assert "<svg" in (tmp_path / "soak.svg").read_text()
    finally:
        child.communicate(b"")
    sampling.look({"child": child.pid}, {})
    assert len(of_child["memory"]) == len(of_child["threads"])


def test_processes_that_did_not_live_through_the_second_half_are_left_out() -> None:
    grown = Lines()
    grown.points["memory"] = [(float(i), i * 100.0 * MIB) for i in range(50)]
    assert not judged({("killed", 1): grown}, 100.0)
    assert [each.verdict.grows for each in judged({("lives", 1): grown}, 50.0)] == [True]
