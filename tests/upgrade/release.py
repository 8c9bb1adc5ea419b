"""The code of each release, from the repository's history, and processes that run it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.rpc.net import free_port
from tests.support.processes.buffer_server import ROOT

_PARTS = ("headrace", "services", "protos", "tests/__init__.py", "tests/support")
_SECONDS = 120.0
RELEASES = tomllib.loads(Path(__file__).with_name("releases.toml").read_text())["release"]
"""The name and commit of each, newest first: parameters of the fixture `release`."""


@dataclass(frozen=True)
class Release:
    """`code` is its tree, which comes first on the path of its processes."""

    name: str
    code: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that runs its code."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        return mine | {"PYTHONPATH": str(self.code)}

    def run(self, *words: str) -> str:
        """What `python WORDS` prints. Raises AssertionError with what it says when it fails."""
        done = subprocess.run(
            [sys.executable, *words], cwd=self.code, env=self.environment, capture_output=True, text=True,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    async def drive(self, order: str, address: str, folder: Path) -> str:
        """The driver's part of this name, with the release's client."""
        driver = Path(__file__).with_name("driver.py")
        return await asyncio.to_thread(self.run, str(driver), order, address, str(folder))

    async def backup(self, address: str, folder: Path) -> None:
        """Makes a backup of a buffer with the release's own command."""
        words = ("-m", "headrace.cli.main", "buffer", "backup", address, str(folder))
        await asyncio.to_thread(self.run, *words)


def extracted(entry: Mapping[str, str], folder: Path) -> Release:
    """The release of RELEASES, with its code in the folder. Skips the test in a clone that has not got it."""
    commit = entry["commit"]
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"this clone has not got commit {commit} of {entry['name']}: git fetch --unshallow")
    archive = subprocess.run(["git", "archive", commit, *_PARTS], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    release = Release(entry["name"], folder)
    found = release.run("-c", "import headrace, services; print(headrace.__file__, services.__file__)").split()
    assert all(Path(file).is_relative_to(folder) for file in found), found
    return release


class ReleaseBuffer:
    """The release's `services.buffer` over a folder's `ledger`, with a job of the release's own."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.config = folder / "release-job.json"
        self._release, self._folder = release, folder
        self._process: asyncio.subprocess.Process | None = None
        self.config.write_text(release.run("-c", _JOB))

    async def __aenter__(self) -> ReleaseBuffer:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.buffer", "--config", str(self.config), "--address", self.address,
            "--data-dir", str(self._folder / "ledger"), cwd=self._release.code, env=self._release.environment,
            stderr=(self._folder / "release.log").open("a"),
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        """`kill -9`: what it leaves is what a crash leaves."""
        assert self._process
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def ended(self) -> tuple[int, str]:
        """Waits until it ends by itself; its exit code, and what it said."""
        assert self._process
        return await self._process.wait(), (self._folder / "release.log").read_text()


_JOB = """
from headrace.job.schema.job import Job
print(Job.model_validate({
    "model": {"hf_checkpoint": "/none"},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
    "buffer": {"max_staleness": 8},
}).model_dump_json())
"""
