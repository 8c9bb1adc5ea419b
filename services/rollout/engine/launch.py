"""`python -m services.rollout.engine.launch --engine N --port P OPTIONS`: one SGLang server.

The names of the job's own arguments are checked here, because only this process imports SGLang and so knows them.

On a CPU the scheduler and the detokenizer are forks of this process. SGLang would start new interpreters, and each
would import torch and SGLang again, which is most of an engine's start and of its memory. A fork takes along no thread,
so they are forked only while this process has a single one; and never with an accelerator, because CUDA does not
survive a fork. SGLang's registry of hooks, which is made for plugins, is where the choice is made.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from services.rollout.engine import arguments
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.machine import Machine

REFUSED = 78
"""The exit code for a job's argument that cannot be given (sysexits.h: EX_CONFIG), after a line that says why."""
NAME = "engine"
"""That line begins with it."""
_STARTS = ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses")


def command(options: EngineOptions, *, engine: int, port: int) -> list[str]:
    """Returns the command that starts engine number `engine` on 127.0.0.1:`port`."""
    given = msgspec.json.encode({**asdict(options), "hf_checkpoint": str(options.hf_checkpoint)}).decode()
    program = [sys.executable, "-m", "services.rollout.engine.launch"]
    return [*program, "--engine", str(engine), "--port", str(port), given]


def main() -> int:
    """Returns after the server has ended, or REFUSED."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.engine.launch")
    parser.add_argument("--engine", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("options", help="EngineOptions as JSON")
    given = parser.parse_args()
    fields = msgspec.json.decode(given.options)
    options = EngineOptions(**{**fields, "hf_checkpoint": Path(fields["hf_checkpoint"])})
    machine = _machine()
    try:
        arguments.check(options.sglang, machine)
        words = arguments.words(options, machine, engine=given.engine, port=given.port)
    except ConfigError as error:
        print(f"{NAME}: {error}", file=sys.stderr)  # noqa: T201  # one line to a person
        return REFUSED
    if not machine.has_accelerator:
        _fork_what_it_starts()
    sys.argv = ["sglang.launch_server", *words]
    runpy.run_module("sglang.launch_server", run_name="__main__")
    return 0


def _machine() -> Machine:
    import torch
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__)
    flags = {a.dest: (a.option_strings[0], a.nargs != 0) for a in parser._actions if a.dest in fields}
    return Machine(torch.accelerator.is_available(), flags)


def _fork_what_it_starts() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for start in _STARTS:
        HookRegistry.register(f"sglang.srt.entrypoints.engine.Engine.{start}", _forking, HookType.AROUND)


def _forking(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    alone = len(os.listdir("/proc/self/task")) == 1
    multiprocessing.set_start_method("fork" if alone else "spawn", force=True)
    return start(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())
