"""Systemd's units are read without a complaint, and start `headrace up` with options that exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.process.exit_status import NOT_WORTH_RESTARTING, NOTHING_TO_LEARN
from tests.support.deployments import DEPLOY, PORTS, SERVICES, job_of

UNITS = DEPLOY / "systemd"
COMMON = (UNITS / "headrace-.service.d" / "common.conf").read_text()
_NO_ANALYZER = shutil.which("systemd-analyze") is None


def unit(service: str) -> str:
    return (UNITS / f"headrace-{service}.service").read_text()


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.M)


def installed(folder: Path) -> Path:
    """The units with a program that this machine has, and both drop-ins."""
    shutil.copytree(UNITS, folder)
    (folder / "tls.conf").rename(folder / "headrace-.service.d" / "tls.conf")
    for file in folder.glob("*.service"):
        file.write_text(file.read_text().replace("/opt/headrace/bin/headrace", shutil.which("true") or "/bin/true"))
    return folder


def complaints(folder: Path) -> str:
    units = sorted(map(str, folder.glob("*.service")))
    path = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:/lib/systemd/system"}
    done = subprocess.run(["systemd-analyze", "verify", *units], env=path, capture_output=True, text=True, check=False)
    return "\n".join(line for line in done.stderr.splitlines() if str(folder) in line or "headrace" in line)


@pytest.mark.skipif(_NO_ANALYZER, reason="systemd-analyze is not here")
def test_systemd_has_no_complaint(tmp_path: Path) -> None:
    folder = installed(tmp_path / "units")
    assert complaints(folder) == ""
    common = folder / "headrace-.service.d" / "common.conf"
    common.write_text(common.read_text().replace("ProtectClock=", "ProtectClocks="))
    assert "ProtectClocks" in complaints(folder)


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_starts_a_job_that_can_be_loaded(service: str, job_file: Path) -> None:
    (start,) = values(unit(service), "ExecStart")
    program, up, *words = shlex.split(start)
    assert (program, up, words[0]) == ("/opt/headrace/bin/headrace", "up", service)
    variables = dict(pair.split("=", 1) for line in values(COMMON, "Environment") for pair in shlex.split(line))
    job = job_of(words, variables, job_file)
    for other, port in PORTS.items():
        assert getattr(job.services, f"{other}_address") == f"127.0.0.1:{port}"
    assert str(job.run.run_dir) == f"/var/lib/{values(COMMON, 'StateDirectory')[0]}"


def test_units_have_no_rights_and_start_again_only_where_that_may_help() -> None:
    for key, value in {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "DynamicUser": "yes",
        "CapabilityBoundingSet": "",
        "Restart": "on-failure",
        "KillMode": "mixed",
        "RestartPreventExitStatus": f"{NOT_WORTH_RESTARTING} {NOTHING_TO_LEARN}",
    }.items():
        assert values(COMMON, key) == [value], key


def test_units_come_after_those_they_need() -> None:
    needed = {"rollout": {"buffer", "reward"}, "trainer": {"buffer", "rollout"}}
    for service in SERVICES:
        for key in ("After", "Wants"):
            (named,) = values(unit(service), key)
            expected = {f"headrace-{other}.service" for other in needed.get(service, ())} or {"network-online.target"}
            assert set(named.split()) == expected
