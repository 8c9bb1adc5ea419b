"""Prints the result of `headrace check`: the plan, what the services found, and the verdict last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.cli.unfolded import print_unfolded
from headrace.job.rules.scope import ELSEWHERE, Scope
from headrace.preflight.report import Report

_INDENT = 2


def print_report(console: Console, plan: Sequence[tuple[str, str]], report: Report, scope: Scope) -> None:
    """The first line says for which machine, where it is not this one; the verdict is the last line."""
    if scope.elsewhere:
        print_unfolded(console, Text(_for_another_machine(scope.elsewhere), style="bold yellow"))
        console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    replaced = {what for what, _ in report.facts}
    for what, how in [*(row for row in plan if row[0] not in replaced), *report.facts]:
        table.add_row(what, Text(_printable(how)))
    print_unfolded(console, table)
    _lines(console, "unchecked", report.unchecked)
    _lines(console, "warnings", report.warnings, "yellow")
    _lines(console, "refused", report.refusals, "red")
    _lines(console, "this check failed, which is a bug: please report it", report.failed, "red")
    if not report.refusals and not report.failed:
        here = "that can be checked here " if scope.elsewhere else ""
        console.print(Text(f"nothing {here}prevents a start", style="bold green"))


def _for_another_machine(why: str) -> str:
    reason = "" if why == ELSEWHERE else f"it has {why}, and this machine has no GPU"
    return (
        f"This job is checked for another machine ({reason or ELSEWHERE}): files and devices that are missing here are "
        "listed as unchecked, and do not refuse it."
    )


def _lines(console: Console, title: str, lines: Sequence[str], style: str = "bold") -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style=style))
    for line in lines:
        print_unfolded(console, Padding(Text(_printable(line)), (0, 0, 0, _INDENT)))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
