"""What a terminal folds stays on one line in a file or a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.view.lines import print_no_wrap

_PATH = "/home/someone/" + "a-long-folder/" * 12 + "train.jsonl"


def test_a_path_in_a_table_stays_whole_in_a_pipe_and_no_line_ends_in_spaces():
    assert _printed(terminal=False).splitlines() == ["prompts  " + _PATH, "seed     1"]


def test_a_terminal_folds_it_to_its_width():
    assert max(map(len, _printed(terminal=True).splitlines())) <= 80


def _printed(*, terminal: bool) -> str:
    file = StringIO()
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("prompts", Text(_PATH))
    table.add_row("seed", Text("1"))
    print_no_wrap(Console(file=file, width=80, force_terminal=terminal), table)
    return file.getvalue()
