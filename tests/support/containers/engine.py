"""A container engine, podman or docker, called as a person calls it.

HEADRACE_CONTAINER_ENGINE is its command (`podman --root /srv/images`), HEADRACE_BUILD_FLAGS and HEADRACE_RUN_FLAGS are
added to every build and every run: `make images` passes its ENGINE, BUILD_FLAGS and RUN_FLAGS on in them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess

from tests.support.deployments import DEPLOY
from tests.support.processes.training_run import ROOT

_BASE = re.compile(r"^ARG BASE=(\S+)$", re.M)
_COMMAND = shlex.split(os.environ.get("HEADRACE_CONTAINER_ENGINE", "podman"))
_BUILD_FLAGS = shlex.split(os.environ.get("HEADRACE_BUILD_FLAGS", ""))
_RUN_FLAGS = shlex.split(os.environ.get("HEADRACE_RUN_FLAGS", ""))
_PULL_SECONDS = 120.0


class Engine:
    def __init__(self) -> None:
        self._command = _COMMAND
        self._build_flags = _BUILD_FLAGS
        self.run_flags = _RUN_FLAGS

    @property
    def is_podman(self) -> bool:
        return "podman" in self._command[0]

    def lacks(self) -> str | None:
        """Why no image can be built here; None where one can."""
        if shutil.which(self._command[0]) is None:
            return f"{self._command[0]} is not here: HEADRACE_CONTAINER_ENGINE names another engine"
        base = self._base()
        if self._asks("image", "inspect", base) or self._asks("pull", base):
            return None
        return f"the images' base {base} is not here and cannot be pulled"

    async def build(self, target: str) -> None:
        """Builds the image headrace-TARGET."""
        form = ["--format", "docker"] if self.is_podman else []  # OCI's own form has no health check
        words = [*form, *self._build_flags, "-f", str(DEPLOY / "Containerfile"), "--target", target]
        await self.said("build", *words, "-t", f"headrace-{target}", str(ROOT))

    async def said(self, *words: str, seconds: float = 900.0, errors: bool = False) -> str:
        """What it prints, with `errors` also on stderr. Raises AssertionError when it fails or takes longer."""
        process = await asyncio.create_subprocess_exec(
            *self._command, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, complaint = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            process.kill()
            raise AssertionError(f"{shlex.join(words)}: no end after {seconds:.0f} s") from None
        text = output.decode(errors="replace")
        assert process.returncode == 0, f"{shlex.join(words)}: {process.returncode}\n{text}\n{complaint.decode()}"
        return text + complaint.decode(errors="replace") if errors else text

    async def does(self, *words: str) -> bool:
        """True when the command succeeds."""
        try:
            await self.said(*words)
        except AssertionError:
            return False
        return True

    def _base(self) -> str:
        named = [word.removeprefix("BASE=") for word in self._build_flags if word.startswith("BASE=")]
        return named[-1] if named else _BASE.findall((DEPLOY / "Containerfile").read_text())[0]

    def _asks(self, *words: str) -> bool:
        try:
            done = subprocess.run([*self._command, *words], capture_output=True, timeout=_PULL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
