"""Ctrl-C with a service, its child, or its guard stopped: all of them end, and the exit code is a signal's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.launch.process import grace_seconds
from headrace.process.linux import runs
from tests.support.processes.leftovers import parent_of
from tests.unit.launch.test_supervisor import HERE


def launched(folder: Path, *before: str) -> subprocess.Popen[str]:
    """`before` are the words before the command."""
    return subprocess.Popen(
        [*before, sys.executable, str(HERE / "run_until_signal.py"), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )


@pytest.mark.parametrize(
    ("stopped", "signals"),
    [
        ("nothing", [signal.SIGINT]),
        ("service", [signal.SIGINT, signal.SIGINT]),
        ("guard", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]),
    ],
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, stopped: str, signals: list[signal.Signals]) -> None:
    with launched(tmp_path) as launcher:
        assert launcher.stdout
        assert "ready" in launcher.stdout.readline()
        service = json.loads((tmp_path / "pids").read_text())["fake"]
        family = {"service": service, "guard": parent_of(service)}
        family["child"] = int((tmp_path / "children").read_text())
        if stopped in family:
            os.kill(family[stopped], signal.SIGSTOP)
        for number in signals:
            launcher.send_signal(number)
            wait_until_taken(launcher.pid, number)
        said = launcher.stdout.read()
        assert launcher.wait(timeout=60) == 130
    assert said.startswith("stopping after this step, 20 s at most (")
    assert "Ctrl-C again ends everything at once\n" in said
    assert ("ending everything now" in said) == (len(signals) > 1)
    assert [name for name, pid in family.items() if runs(pid)] == []


def wait_until_taken(pid: int, number: signal.Signals) -> None:
    """Two signals of a kind are one until the first was taken."""
    while runs(pid):
        pending = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Pnd" in line]
        if not any(int(mask, 16) >> (number - 1) & 1 for mask in pending):
            return


@pytest.mark.parametrize(
    ("step_seconds", "grace"),
    [((), 20), ((4.0,), 20), ((90.0, 4.0, 4.0, 4.0), 20), ((48.1, 106.2, 63.0), 212.4), ((5000.0,), 600)],
)
def test_the_grace_follows_the_last_steps(tmp_path: Path, step_seconds: tuple[float, ...], grace: float) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert grace_seconds(metrics) == 20
    rows = [json.dumps({"step": step, "time/step_seconds": seconds}) for step, seconds in enumerate(step_seconds)]
    metrics.write_text("\n".join(['{"step": 0, "eval/sums": 0.5}', *rows, '{"step": 7, "time/step_sec']))
    assert grace_seconds(metrics) == grace
