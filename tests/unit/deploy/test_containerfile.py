"""Each image gets its own service's packages, runs without rights, and is asked for its health where it listens."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.deployments import DEPLOY, PORTS, PROBE, SERVICES

_CONTINUED = re.compile(r"\s*\\\n\s*")
SETS = {
    ("buffer", "cpu"): ["-r /buffer.txt"],
    ("reward", "cpu"): ["-r /reward.txt"],
    ("rollout", "cpu"): ["-r /cpu.txt -r /cpu-no-deps.txt"],
    ("trainer", "cpu"): ["-r /cpu.txt -r /cpu-no-deps.txt"],
    ("rollout", "cuda"): ["--require-hashes -r /cuda-rollout.txt"],
    ("trainer", "cuda"): ["--require-hashes -r /cuda-trainer.txt"],
}


def stages() -> dict[str, list[str]]:
    """Every stage's instructions, without comments."""
    found: dict[str, list[str]] = {}
    for line in _CONTINUED.sub(" ", (DEPLOY / "Containerfile").read_text()).splitlines():
        if line.startswith("FROM"):
            found[line.split()[-1]] = [line]
        elif found and line and not line.startswith("#"):
            list(found.values())[-1].append(line)
    return found


def ran(stage: str, package_set: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The stage's RUN lines in a shell, with a pip that prints what it is to install, and nothing to slim."""
    script = "\n".join(
        line.removeprefix("RUN ").replace("/slim.sh", "true") for line in stages()[stage] if line.startswith("RUN ")
    )
    environment = {**os.environ, "SET": package_set, "PIP": "echo"}
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
