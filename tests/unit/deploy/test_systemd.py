"""Systemd's units are read without a complaint, and start `headrace up` with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.process.exit_status import NOT_WORTH_RESTARTING, NOTHING_TO_LEARN
from tests.support.deployments import DEPLOY, PORTS, SERVICES, job_of

UNITS = DEPLOY / "systemd"
COMMON = (UNITS / "headrace-.service.d" / "common.conf").read_text()


def unit(service: str) -> str:
    return (UNITS / f"headrace-{service}.service").read_text()


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.M)


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
