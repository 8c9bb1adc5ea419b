"""`headrace doctor`: every finding has a state, and each problem says what mends it."""

from __future__ import annotations

import json

import pytest

from headrace.cli.commands import doctor
from headrace.cli.main import main


def found_by_doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    main(["doctor", "--fast", "--json", *words])
    return {each["what"]: each for each in json.loads(capsys.readouterr().out)}


def test_this_machine_has_what_tests_need(tmp_path, capsys):
    found = found_by_doctor(capsys, "--run-dir", str(tmp_path))
    assert found["Python"]["state"] == "ok"
    assert found["network"]["state"] == "ok"
    assert {"buffer", "reward", "rollout", "trainer", "memory", "disk", "fsync", "sandbox"} <= found.keys()


def test_a_slow_disk_says_what_mends_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_sync_seconds", lambda folder: 0.2)
    found = found_by_doctor(capsys, "--run-dir", str(tmp_path))
    assert found["fsync"]["state"] == "warning"
    assert "--run-dir" in found["fsync"]["mends"]


def test_a_missing_package_names_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(doctor._OF_SERVICE, "reward", ("a-package-that-nobody-has",))
    found = found_by_doctor(capsys, "--run-dir", str(tmp_path))
    assert found["reward"]["state"] == "warning"
    assert "a-package-that-nobody-has" in found["reward"]["found"]


def test_a_driver_without_a_torch_for_it_is_a_problem(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    (finding,) = doctor._gpus([], None, None)
    assert finding.state == "problem"
    assert finding.mends
