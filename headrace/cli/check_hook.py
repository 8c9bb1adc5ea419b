"""`headrace check hook PATH`: loads a hook and tries it on samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from headrace.hooks import check_hook as run_check
from headrace.hooks.check import KINDS


def check_hook(argv: Sequence[str]) -> int:
    """1 where something failed."""
    parser = argparse.ArgumentParser(prog="headrace check hook", description="Loads a hook and tries it on samples.")
    parser.add_argument("path", help="pkg.mod.fn or file.py:fn")
    parser.add_argument("--kind", choices=KINDS, help="what it is; absent: told from its arguments")
    args = parser.parse_args(argv)
    report = run_check(args.path, args.kind)
    for line in report.passed:
        print(f"ok      {line}")
    for line in report.failed:
        print(f"failed  {line}")
    return 1 if report.failed else 0
