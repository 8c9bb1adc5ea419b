"""`headrace check JOB.toml [flags]` and `headrace check hook PATH`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from headrace.cli.job_arguments import flags_help, load_job, wants_help
from headrace.cli.plan import plan
from headrace.hooks import check_hook
from headrace.hooks.check import KINDS


def check(argv: Sequence[str]) -> int:
    """Prints the plan; a contradiction is an error that says what to change."""
    if argv and argv[0] == "hook":
        return _hook(argv[1:])
    if not argv or wants_help(argv):
        print("usage: headrace check [JOB.toml] [flags] | headrace check hook PATH [--kind KIND]\n", flags_help(argv))
        return 0
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, how in plan(load_job(argv)):
        table.add_row(what, how)
    Console().print(table)
    return 0


def _hook(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="headrace check hook", description="Loads a hook and tries it on samples.")
    parser.add_argument("path", help="pkg.mod.fn or file.py:fn")
    parser.add_argument("--kind", choices=KINDS, help="what it is; absent: told from its arguments")
    args = parser.parse_args(argv)
    report = check_hook(args.path, args.kind)
    for line in report.passed:
        print(f"ok      {line}")
    for line in report.failed:
        print(f"failed  {line}")
    return 1 if report.failed else 0
