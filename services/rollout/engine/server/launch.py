"""`python -m services.rollout.engine.server.launch --engine N --port P OPTIONS`: one SGLang server.

The names of the job's own arguments are checked here, because only this process imports SGLang and so knows them.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from headrace.errors import ConfigError
from services.rollout.engine import arguments
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.cpu import startup
from services.rollout.engine.machine import Machine
from services.rollout.engine.server.routed_experts import always_returned

REFUSED = 78
"""The exit code for a job's argument that cannot be given (sysexits.h: EX_CONFIG), after a line that says why."""
NAME = "engine"
"""That line begins with it."""


def command(options: EngineOptions, *, engine: int, port: int) -> list[str]:
    """Returns the command that starts engine number `engine` on 127.0.0.1:`port`."""
    given = msgspec.json.encode({**asdict(options), "hf_checkpoint": str(options.hf_checkpoint)}).decode()
    program = [sys.executable, "-m", "services.rollout.engine.server.launch"]
    return [*program, "--engine", str(engine), "--port", str(port), given]


def main() -> int:
    """Returns after the server has ended, or REFUSED."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.engine.server.launch")
    parser.add_argument("--engine", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("options", help="EngineOptions as JSON")
    given = parser.parse_args()
    fields = msgspec.json.decode(given.options)
    options = EngineOptions(**{**fields, "hf_checkpoint": Path(fields["hf_checkpoint"])})
    machine = _machine(options.hf_checkpoint)
    try:
        arguments.check(options.sglang, machine)
        words = arguments.words(options, machine, engine=given.engine, port=given.port)
    except ConfigError as error:
        print(f"{NAME}: {error}", file=sys.stderr)  # noqa: T201  # one line to a person
        return REFUSED
    if not machine.has_accelerator:
        startup.fork_processes()
    if options.returns_experts:
        always_returned()
    sys.argv = ["sglang.launch_server", *words]
    runpy.run_module("sglang.launch_server", run_name="__main__")
    return 0


def _machine(hf_checkpoint: Path) -> Machine:
    import torch

    has_accelerator = torch.accelerator.is_available()
    if not has_accelerator:
        startup.leave_out(hf_checkpoint)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__)
    flags = {a.dest: (a.option_strings[0], a.nargs != 0) for a in parser._actions if a.dest in fields}
    return Machine(has_accelerator, flags)


if __name__ == "__main__":
    sys.exit(main())
