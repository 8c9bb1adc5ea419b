"""A container engine, podman or docker, called as a person calls it.

HEADRACE_CONTAINER_ENGINE is its command (`podman --root /srv/images`), HEADRACE_RUN_FLAGS are added to every run:
`make images` passes its ENGINE and RUN_FLAGS on in them.
"""

from __future__ import annotations

import asyncio
import os
import shlex

_COMMAND = shlex.split(os.environ.get("HEADRACE_CONTAINER_ENGINE", "podman"))
_RUN_FLAGS = shlex.split(os.environ.get("HEADRACE_RUN_FLAGS", ""))


class Engine:
    def __init__(self) -> None:
        self._command = _COMMAND
        self.run_flags = _RUN_FLAGS

    @property
    def is_podman(self) -> bool:
        return "podman" in self._command[0]

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
