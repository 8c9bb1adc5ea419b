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


@pytest.mark.parametrize("service", ["rollout", "trainer"])
def test_a_set_that_is_none_is_refused_with_those_there_are(service: str, tmp_path: Path) -> None:
    done = ran(f"{service}-packages", "cude", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "SET is cude: cpu or cuda\n")


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


def test_images_run_as_a_user_without_rights_and_end_by_the_signal_that_drains() -> None:
    common = stages()["service"]
    assert {"USER 10001:10001", "STOPSIGNAL SIGTERM", "VOLUME /var/lib/headrace"} <= set(common)
    assert not any(line.startswith(("USER", "STOPSIGNAL")) for name in SERVICES for line in stages()[name])


def test_slimming_takes_tests_and_headers_and_leaves_code(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in (
        "a/core.py",
        "a/tests/test_core.py",
        "a/core.c",
        "a/core.h",
        "a/core.pyi",
        "pip/x.py",
        "b/testing/x.py",
    ):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("")
    script = (DEPLOY / "slim.sh").read_text().replace("/opt/headrace", str(tmp_path))
    subprocess.run(["sh", "-ec", script], check=True)
    assert sorted(str(file.relative_to(packages)) for file in packages.rglob("*") if file.is_file()) == [
        "a/core.py",
        "b/testing/x.py",
    ]
