"""Finds out what the machine has for engines."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from headrace.errors import Unavailable

_SECONDS = 120.0
_ASK = "import torch; print(torch.accelerator.is_available())"


@dataclass(frozen=True, slots=True)
class Machine:
    """`flags`: ServerArgs field → its command line option, and whether the option takes a value."""

    has_accelerator: bool
    flags: Mapping[str, tuple[str, bool]]


async def has_accelerator() -> bool:
    """Asks torch, in a short-lived process; a torch that was built for CPUs alone has none and is not asked.

    Raises Unavailable when torch cannot be imported.
    """
    try:
        if version("torch").endswith("+cpu") and not entry_points(group="torch.backends"):
            return False
    except PackageNotFoundError as error:
        raise _unusable(str(error)) from error
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _ASK),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError as error:
        process.kill()
        raise Unavailable(f"importing torch took longer than {_SECONDS:g} s") from error
    words = out.decode().split()
    if process.returncode or not words:
        raise _unusable("\n".join(err.decode(errors="replace").splitlines()[-8:]))
    return words[-1] == "True"


def _unusable(why: str) -> Unavailable:
    return Unavailable(f"torch cannot be used here; install it and SGLang as requirements/README.md says:\n{why}")
