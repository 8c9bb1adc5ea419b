"""Prints the result of `headrace check`: the plan, what the services found, and the verdict last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.cli.unfolded import print_unfolded
from headrace.job.rules.scope import Scope
from headrace.preflight.report import Report

_INDENT = 2


def print_report(console: Console, plan: Sequence[tuple[str, str]], report: Report, scope: Scope) -> None:
    """The verdict is the last line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    replaced = {what for what, _ in report.facts}
    for what, how in [*(row for row in plan if row[0] not in replaced), *report.facts]:
        table.add_row(what, Text(_printable(how)))
    print_unfolded(console, table)
    reason = f" here: this job is for another machine ({scope.elsewhere})" if scope.elsewhere else ""
    _lines(console, f"unchecked{reason}", report.unchecked)
    _lines(console, "warnings", report.warnings, "yellow")
    _lines(console, "refused", report.refusals, "red")
    if not report.refusals:
        console.print(Text("nothing prevents a start", style="bold green"))


def _lines(console: Console, title: str, lines: Sequence[str], style: str = "bold") -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style=style))
    for line in lines:
        print_unfolded(console, Padding(Text(_printable(line)), (0, 0, 0, _INDENT)))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
