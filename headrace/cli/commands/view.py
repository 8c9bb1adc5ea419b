"""`headrace view [RUN]`: the run's samples, tokens, ledger and curves in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.arg_types import PATH, run_argument
from headrace.cli.runs import find_run
from headrace.client.open import open_buffer
from headrace.errors import ConfigError, FailedPrecondition, HeadraceError
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.run_folder import RunFolder
from headrace.view.data import LedgerCounts, RunData
from headrace.view.server import INDEX, PageServer, write_page

_PORT = 7010
_STREAM = "train"
_LEDGER_SECONDS = 20.0


@click.command()
@run_argument
@click.option("--to", type=PATH, metavar="FOLDER", help="Write the page into FOLDER, to be opened as a file.")
@click.option("--port", type=click.IntRange(0, 65_535), help=f"Serve it here; 0: any free port.  [default: {_PORT}]")
def view(run: str | None, to: Path | None, port: int | None) -> int:
    """Shows a run in the browser: groups side by side, tokens with log-probs and advantages, ledger, curves, search.

    Without --to the page is served on this machine until Ctrl-C, and follows a live run.
    """
    if to is not None and port is not None:
        raise ConfigError(f"--to {to} writes files and serves nothing: leave out --port {port}")
    folder = find_run(run)
    data, ledger = RunData(folder), _Ledger(folder)
    if to is not None:
        with Progress(transient=True) as progress:
            task = progress.add_task("writing steps", total=None)
            num_bytes = write_page(
                data, ledger.read(), to, lambda done, of: progress.update(task, completed=done, total=of)
            )
        Console().print(f"{to / INDEX}: {num_bytes / 1e6:,.1f} MB", highlight=False, soft_wrap=True)
        return 0
    try:
        server = PageServer(data, ledger.read, _PORT if port is None else port)
    except OSError as error:
        raise FailedPrecondition(
            f"port {port} cannot be opened ({error.strerror}): pass another --port, or 0"
        ) from error
    with server:
        Console().print(f"{folder.path.name}: {server.url}    (Ctrl-C ends)", highlight=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


class _Ledger:
    """The counts of the run's ledger. That of an ended run does not change, so it is read once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._last: LedgerCounts | None = None
        self._has_ended = False

    def read(self) -> LedgerCounts | None:
        """None where the ledger is neither served nor on this machine."""
        if not self._has_ended:
            self._has_ended = not self._folder.running_services()
            with contextlib.suppress(HeadraceError, OSError):
                self._last = LedgerCounts(asyncio.run(asyncio.wait_for(self._stats(), _LEDGER_SECONDS)), time.time())
        return self._last

    async def _stats(self) -> pb.StreamStats:
        async with (
            buffer_of_run(self._folder, _LEDGER_SECONDS, read_only=True) as address,
            open_buffer(address) as buffer,
        ):
            return await buffer.stats(_STREAM)
