"""The images' file agrees with the project: sets, options and modules that it names are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from headrace.job.option import options
from headrace.launch.specs import SERVICES
from tools.requirements import FOLDER, ROOT

FILE = (ROOT / "deploy/Containerfile").read_text()


def test_each_service_has_an_image_that_runs_it_and_asks_whether_it_serves() -> None:
    for service, port in zip(SERVICES, ("7001", "7002", "7003", "7004"), strict=True):
        stage = FILE.split(f"FROM service AS {service}\n")[1].split("\nFROM ")[0]
        assert f'CMD ["{service}", "--config", "/job/job.toml"]' in stage
        assert f"EXPOSE {port}" in stage
        assert f"python -m headrace.launch.health 127.0.0.1:{port}" in stage
        assert re.search(rf"HEADRACE_{service.upper()}_ADDRESS={service}:{port}\b", FILE)
    assert importlib.util.find_spec("headrace.launch.health")


def test_every_variable_is_an_option_of_a_job() -> None:
    named = {name.lower() for name in re.findall(r"\bHEADRACE_([A-Z_]+)=", FILE)}
    assert named
    assert named <= set(options())


def test_every_set_of_packages_is_there() -> None:
    for name in re.findall(r"/requirements/([a-z-]+\.txt)", FILE):
        assert (FOLDER / name).is_file(), name


def test_what_is_copied_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", FILE, re.MULTILINE)
    paths = {path for line in copied for path in line.split()}
    roots = {
        path: next((root for root in allowed if path == root or path.startswith(f"{root}/")), None) for path in paths
    }
    assert set(roots.values()) == allowed
    assert all((ROOT / path).exists() for path in allowed)


@pytest.mark.parametrize("name", ["USER 10001:10001", "STOPSIGNAL SIGTERM", "VOLUME /var/lib/headrace"])
def test_a_service_has_no_rights_and_ends_when_asked(name: str) -> None:
    assert name in FILE.split("AS service\n")[1].split("\nFROM ")[0]


def test_the_script_that_makes_images_slim_can_be_run() -> None:
    assert Path(ROOT / "deploy/slim.sh").stat().st_mode & 0o111
