"""The two wheels of this repository: no file in both, and the client's works alone in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.long_forms import whole_run
from tests.support.models.tiny_model import make_tiny_qwen3

ROOT = Path(__file__).parents[2]
_SECONDS = 300.0
_CLIENT_BYTES = 2_000_000


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the names of the distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder)
    _run(sys.executable, *words, ROOT, ROOT / "services")
    return {file.name.split("-")[0]: file for file in folder.glob("*.whl")}


def test_the_wheels_share_no_file_and_have_a_package_each(wheels: dict[str, Path]) -> None:
    files = {name: set(ZipFile(wheel).namelist()) for name, wheel in wheels.items()}
    assert set(files) == {"headrace", "headrace_services"}
    assert not set.intersection(*files.values())
    assert _packages(files["headrace"]) == {"headrace"}
    assert _packages(files["headrace_services"]) == {"services"}


@pytest.mark.parametrize(("name", "package"), [("headrace", "headrace"), ("headrace_services", "services")])
def test_a_wheel_has_every_module_and_table_of_its_package(wheels: dict[str, Path], name: str, package: str) -> None:
    packed = {file for file in ZipFile(wheels[name]).namelist() if file.startswith(package)}
    own = [file for ending in ("py", "toml") for file in (ROOT / package).rglob(f"*.{ending}")]
    assert {str(file.relative_to(ROOT)) for file in own} - packed <= {"services/pyproject.toml"}
    assert f"{package}/py.typed" in packed


def test_the_clients_wheel_is_small(wheels: dict[str, Path]) -> None:
    assert wheels["headrace"].stat().st_size <= _CLIENT_BYTES


def test_sglangs_platform_comes_with_the_services(wheels: dict[str, Path]) -> None:
    entry_points = {name: _entry_points(wheel) for name, wheel in wheels.items()}
    assert "sglang.srt.platforms" in entry_points["headrace_services"]
    assert "sglang.srt.plugins" in entry_points["headrace_services"]
    assert "sglang.srt.platforms" not in entry_points["headrace"]


@whole_run
def test_the_client_alone_has_its_commands_and_writes_a_job(wheels: dict[str, Path], tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    _run(binaries / "python", "-m", "pip", "install", "--quiet", wheels["headrace"])
    assert "headrace train [JOB.toml]" in _run(binaries / "headrace", "--help", folder=tmp_path)
    _run(binaries / "headrace", "init", "x", "--model", model, folder=tmp_path)
    assert (tmp_path / "x" / "job.toml").is_file()
    refused = subprocess.run(
        [binaries / "headrace", "train"], cwd=tmp_path / "x", capture_output=True, text=True, timeout=60
    )
    assert (refused.returncode, "headrace[buffer,reward,rollout-cpu,trainer-cpu]" in refused.stderr) == (2, True)
    program = """
import sys
from importlib.util import find_spec
import headrace.client.open, headrace.client.reward, headrace.client.trainer, headrace.hooks
assert find_spec("services") is None and find_spec("torch") is None
print(headrace.__file__)
"""
    assert str(binaries.parent) in _run(binaries / "python", "-c", program, folder=tmp_path)


def _packages(files: set[str]) -> set[str]:
    return {file.split("/")[0] for file in files if ".dist-info/" not in file}


def _entry_points(wheel: Path) -> str:
    with ZipFile(wheel) as files:
        return next(files.read(name).decode() for name in files.namelist() if name.endswith("entry_points.txt"))


def _run(*words: str | Path, folder: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*map(str, words)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
