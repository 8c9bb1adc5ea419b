"""Finds out what the machine has for engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from headrace.errors import Unavailable
from headrace.process.one_shot import run_once

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
    try:
        asked = await run_once((sys.executable, "-c", _ASK), {**os.environ, "OMP_NUM_THREADS": "1"}, seconds=_SECONDS)
    except TimeoutError as error:
        raise Unavailable(f"importing torch took longer than {_SECONDS:g} s") from error
    words = asked.out.decode().split()
    if asked.exit_code or not words:
        raise _unusable("\n".join(asked.last_lines))
    return words[-1] == "True"


def _unusable(why: str) -> Unavailable:
    return Unavailable(f"torch cannot be used here; install it and SGLang as requirements/README.md says:\n{why}")
