"""A run's evaluations as a table of steps by data sets, from the rows of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from headrace.cli.words import printable
from headrace.run_folder import fields_in

_MEAN = "eval/"


def history(file: Path) -> Table | None:
    """Returns None where no evaluation has ended. Of a step that was evaluated twice, the later row counts."""
    rows = {row["step"]: row for row in fields_in(file) if "eval_error" in row}
    if not rows:
        return None
    names = sorted({name.removeprefix(_MEAN) for row in rows.values() for name in row if name.startswith(_MEAN)})
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(escape(printable(name)))
    table.add_column("versions")
    for step in sorted(rows):
        row = rows[step]
        table.add_row(str(step), *(_cell(row, name) for name in names), _versions(row, names))
        for warning in row.get("warnings", ()):
            table.add_row("", *("" for _ in names), f"[dim]{escape(printable(str(warning)))}[/]")
    return table


def _cell(row: Mapping[str, Any], name: str) -> str:
    mean, low, high = (row.get(f"{kind}/{name}") for kind in ("eval", "eval_low", "eval_high"))
    if mean is None:
        return "–"
    interval = f" [dim]\\[{low:.3f}, {high:.3f}][/]" if low is not None and high is not None else ""
    passed = [f" @{k} {share:.3f}" for k, share in _passes(row, name) if k > 1]
    return f"{mean:.3f}{interval}{''.join(passed)}"


def _passes(row: Mapping[str, Any], name: str) -> list[tuple[int, float]]:
    prefix = f"eval_pass/{name}@"
    return sorted((int(key.removeprefix(prefix)), share) for key, share in row.items() if key.startswith(prefix))


def _versions(row: Mapping[str, Any], names: Sequence[str]) -> str:
    lows = [row[key] for name in names if (key := f"eval_min_version/{name}") in row]
    highs = [row[key] for name in names if (key := f"eval_max_version/{name}") in row]
    if not lows or not highs:
        return "no result"
    first, last = int(min(lows)), int(max(highs))
    return str(first) if first == last else f"{first} to {last}"
