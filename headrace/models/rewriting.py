"""The command line of a program that writes a model's folder again in another form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from headrace.errors import HeadraceError


def main_of(module: str, about: str | None, model: str, write: Callable[[Path, Path], str]) -> int:
    """Calls `write(model, folder)` with the two folders of the command line, and prints what it says was written.

    `model` says what kind of folder the first one is. Returns the exit code: 2 after an error, which is printed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("model", type=Path, help=model)
    parser.add_argument("folder", type=Path, help="the folder to write, which must not exist")
    given = parser.parse_args()
    try:
        written = write(given.model, given.folder)
    except HeadraceError as error:
        print(f"{module.rpartition('.')[2]}: {error.message}", file=sys.stderr)  # noqa: T201  # one line to a person
        return 2
    print(f"{given.folder}: {written}")  # noqa: T201  # one line to a person
    return 0
