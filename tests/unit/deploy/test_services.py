"""Images, the compose file and systemd's units name packages, options, commands and ports that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import ConfigError
from headrace.process.exit_status import NOT_WORTH_RESTARTING, NOTHING_TO_LEARN
from tests.support.deployments import DEPLOY, PORTS, PROBE, SERVICES, job_of, targets, variables_of_images

_CONTINUED = re.compile(r"\s*\\\n\s*")
SETS = {
    ("buffer", "cpu"): ["-r /buffer.txt"],
    ("reward", "cpu"): ["-r /reward.txt"],
    ("rollout", "cpu"): ["-r /cpu.txt -r /cpu-no-deps.txt"],
    ("trainer", "cpu"): ["-r /cpu.txt -r /cpu-no-deps.txt"],
    ("rollout", "cuda"): ["--require-hashes -r /cuda-rollout.txt"],
    ("trainer", "cuda"): ["--require-hashes -r /cuda-trainer.txt"],
    ("headrace", "cpu"): ["-r /quickstart.txt"],
    ("ray", "cpu"): ["-r /ray.txt"],
}
"""Those of `headrace` and `ray` are beside the trainer's, which on a CPU are the packages of all services."""


def stages() -> dict[str, list[str]]:
    """Every stage's instructions, without comments."""
    found: dict[str, list[str]] = {}
    for line in _CONTINUED.sub(" ", (DEPLOY / "Containerfile").read_text()).splitlines():
        if line.startswith("FROM"):
            found[line.split()[-1]] = [line]
        elif found and line and not line.startswith("#"):
            list(found.values())[-1].append(line)
    return found


def ran(stage: str, package_set: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The stage's RUN lines in a shell, with a pip that prints what it is to install, and nothing to slim."""
    script = "\n".join(
        line.removeprefix("RUN ").replace("/slim.sh", "true") for line in stages()[stage] if line.startswith("RUN ")
    )
    environment = {**os.environ, "SET": package_set, "PIP": "echo", **variables}
    return subprocess.run(
        ["sh", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("service", "package_set"), SETS)
def test_an_image_gets_the_packages_of_its_service_and_set(service: str, package_set: str, tmp_path: Path) -> None:
    done = ran(f"{service}-packages", package_set, tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, SETS[service, package_set]), done.stderr
    copied = {Path(word).name for line in stages()[f"{service}-packages"] for word in line.split() if ".txt" in word}
    for name in re.findall(r"[a-z-]+\.txt", done.stdout):
        assert name in copied
        assert (DEPLOY.parent / "requirements" / name).is_file()


def test_gpus_are_for_rollout_and_trainer_under_the_python_of_their_sets(tmp_path: Path) -> None:
    assert ran("environment", "cuda", tmp_path, PYTHON="python3.11").returncode == 2
    assert ran("headrace-packages", "cuda", tmp_path).returncode == 2
    for stage in ("headrace-packages", "ray-packages"):
        assert stages()[stage][0] == f"FROM trainer-packages AS {stage}"


@pytest.mark.parametrize("image", ["headrace", "ray"])
def test_an_image_of_all_services_has_headrace_and_a_user_without_rights(image: str) -> None:
    lines = stages()[image]
    assert f"COPY --from={image}-packages /opt/headrace /opt/headrace" in lines
    assert "COPY --from=project /opt/headrace /opt/headrace" in lines
    assert "USER 10001:10001" in lines


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = set(re.findall(r"^!(\S+)$", (DEPLOY.parent / ".containerignore").read_text(), re.M))
    for line in (
        line for stage in stages().values() for line in stage if line.startswith("COPY ") and "--from" not in line
    ):
        for source in line.split()[1:-1]:
            assert (DEPLOY.parent / source).exists(), source
            assert {source, source.split("/")[0]} & kept, source


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_headrace_over_its_packages_and_asked_for_its_health_where_it_listens(service: str) -> None:
    start, *lines = stages()[service]
    assert start == f"FROM service AS {service}"
    assert lines[:2] == [
        f"COPY --from={stage} /opt/headrace /opt/headrace" for stage in (f"{service}-packages", "project")
    ]
    (probe,) = [line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK ")]
    assert probe.split() == [*PROBE, f"127.0.0.1:{PORTS[service]}"]
    assert f"EXPOSE {PORTS[service]}" in lines
    assert lines[-1] == f'CMD ["{service}", "--config", "/job/job.toml"]'


COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_every_image_of_compose_is_a_target_of_the_containerfile() -> None:
    assert set(COMPOSE["services"]) == {*SERVICES, "certs"}
    for name, service in COMPOSE["services"].items():
        build = service["build"]
        assert build["target"] in targets(), name
        assert service["image"] == f"headrace-{build['target']}"
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_of_compose_gets_a_job_that_can_be_loaded(service: str, job_file: Path) -> None:
    found = COMPOSE["services"][service]
    assert found["command"][0] == service
    given = {**variables_of_images(), **found["environment"]}
    job = job_of(found["command"], given, job_file)
    assert str(job.services.tls_dir) == given["HEADRACE_TLS_DIR"]
    assert not job.services.insecure
    assert job.services.metrics_port == 9464
    for other, port in PORTS.items():
        assert getattr(job.services, f"{other}_address") == f"{other}:{port}"
    with pytest.raises(ConfigError, match="HEADRACE_METRIC_PORT"):
        job_of(found["command"], {**given, "HEADRACE_METRIC_PORT": "1"}, job_file)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_of_compose_is_probed_where_it_listens_and_waits_for_those_it_needs(service: str) -> None:
    found = COMPOSE["services"][service]
    assert found["healthcheck"]["test"] == ["CMD", *PROBE, f"127.0.0.1:{PORTS[service]}"]
    needed = {"buffer": {"certs"}, "reward": {"certs"}, "rollout": {"buffer", "reward"}}
    assert set(found["depends_on"]) == needed.get(service, {"buffer", "rollout"})
    for other, how in found["depends_on"].items():
        done = "service_completed_successfully" if other == "certs" else "service_healthy"
        assert how == {"condition": done}


UNITS = DEPLOY / "systemd"
COMMON = (UNITS / "headrace-.service.d" / "common.conf").read_text()


def unit(service: str) -> str:
    return (UNITS / f"headrace-{service}.service").read_text()


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.M)


@pytest.mark.parametrize("service", SERVICES)
def test_a_unit_of_systemd_starts_a_job_that_can_be_loaded(service: str, job_file: Path) -> None:
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
