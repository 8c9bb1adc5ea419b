"""Runs a module with constants of its program changed, for a test that cannot wait for their values.

    python with_constants.py services.buffer.build:LEASE_SECONDS=3.0 … -m services.buffer …

It is a Python to name with `--buffer-python`: the words before `-m` are constants, those behind it are Python's own.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def python_with(*constants: str) -> str:
    """The command that stands for a Python, as a job names one; each constant is MODULE:NAME=VALUE."""
    return shlex.join([sys.executable, __file__, *constants])


def main(argv: Sequence[str]) -> None:
    words = list(argv)
    at = words.index("-m")
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    for constant in words[:at]:
        module, _, setting = constant.partition(":")
        name, _, value = setting.partition("=")
        part = importlib.import_module(module)
        assert hasattr(part, name), constant
        setattr(part, name, ast.literal_eval(value))
    sys.argv = words[at + 1 :]
    runpy.run_module(words[at + 1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
