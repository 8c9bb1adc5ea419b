"""Tables and paragraphs: folded to a terminal's width, and with whole lines in a file or a pipe."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType
from rich.text import Text

_MAX_CHARACTERS = 100_000  # of a line; rich lays a table out for a width, and needs one


def print_unfolded(console: Console, what: RenderableType) -> None:
    """Prints to a terminal as it is; elsewhere a path or a sentence stays on one line, where grep finds it."""
    if console.is_terminal:
        console.print(what)
        return
    wide = Console(file=StringIO(), width=_MAX_CHARACTERS)
    with wide.capture() as captured:
        wide.print(what)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)
