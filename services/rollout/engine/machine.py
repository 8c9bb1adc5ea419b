"""Asks SGLang what the machine has for engines: `python -m services.rollout.engine.machine` prints JSON.

SGLang and torch take seconds and hundreds of megabytes to import, so a short-lived process does it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import Unavailable

_SECONDS = 120.0
_MARK = "headrace-machine:"


@dataclass(frozen=True, slots=True)
class Machine:
    """`flags`: ServerArgs field → its command line option, and whether the option takes a value."""

    has_accelerator: bool
    flags: Mapping[str, tuple[str, bool]]


async def detect_machine() -> Machine:
    """Raises Unavailable, with the end of the traceback, when SGLang cannot be imported."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.rollout.engine.machine"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _SECONDS)
    except TimeoutError as error:
        process.kill()
        raise Unavailable(f"importing sglang took longer than {_SECONDS:g} s") from error
    for line in out.decode().splitlines():
        if line.startswith(_MARK):
            facts = json.loads(line.removeprefix(_MARK))
            return Machine(facts["has_accelerator"], {k: (f, v) for k, (f, v) in facts["flags"].items()})
    last = "\n".join(err.decode(errors="replace").splitlines()[-8:])
    raise Unavailable(f"sglang cannot be used here; install it as requirements/README.md says:\n{last}")


def main() -> None:
    import argparse

    import torch
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__)
    flags = {a.dest: (a.option_strings[0], a.nargs != 0) for a in parser._actions if a.dest in fields}
    print(_MARK + json.dumps({"has_accelerator": torch.accelerator.is_available(), "flags": flags}))  # noqa: T201  # the parent reads it


if __name__ == "__main__":
    main()
