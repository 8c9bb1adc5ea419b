"""Shows a view as a live table on a terminal, and as plain lines anywhere else."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.live import Live

from headrace.cli.view.run_view import RunView

_REFRESH_SECONDS = 0.25


async def show(view: RunView, console: Console) -> None:
    """Returns when the view has ended."""
    if console.is_terminal:
        await _table(view, console)
    else:
        await _lines(view)


async def _table(view: RunView, console: Console) -> None:
    with Live(view, console=console, auto_refresh=False) as live:
        while not view.ended:
            live.update(view, refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)
        live.update(view, refresh=True)


async def _lines(view: RunView) -> None:
    while True:
        ended = view.ended
        for line in view.unread():
            print(line, flush=True)
        if ended:
            return
        await asyncio.sleep(_REFRESH_SECONDS)
