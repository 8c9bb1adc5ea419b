"""Ctrl-C with a service, its child, or its guard stopped: all of them end, and the exit code is a signal's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.linux import runs
from tests.unit.launch.test_supervisor import HERE


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("stopped", "signals"),
    [
        ("nothing", [signal.SIGINT]),
        ("service", [signal.SIGINT]),
        ("service", [signal.SIGINT, signal.SIGINT]),
        ("child", [signal.SIGINT, signal.SIGINT]),
        ("guard", [signal.SIGINT, signal.SIGINT]),
        ("guard", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]),
    ],
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, stopped: str, signals: list[signal.Signals]) -> None:
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "run_until_signal.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )
    with launcher:
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
