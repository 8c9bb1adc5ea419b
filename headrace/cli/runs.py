"""Which run a command is about, and where its services are."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from headrace.errors import FailedPrecondition, NotFound, Unavailable
from headrace.launch.run_folder import RunFolder, newest_run
from headrace.rpc.channel import connect

RUNS = Path("runs")
_ANSWER_SECONDS = 10.0


def add_run_argument(parser: argparse.ArgumentParser, name: str = "run") -> None:
    """`RUN` or `--run RUN`: a run's folder, its name, or nothing for the newest."""
    help_text = "a run's folder, or its name in runs/; the newest run if absent"
    if name.startswith("--"):
        parser.add_argument(name, help=help_text)
    else:
        parser.add_argument(name, nargs="?", help=help_text)


def find_run(text: str | None) -> RunFolder:
    """Raises NotFound with what there is."""
    if text is None:
        return newest_run(RUNS)
    for path in (Path(text), RUNS / text):
        if (path / "services.json").is_file():
            return RunFolder(path)
    there = sorted(file.parent.name for file in RUNS.glob("*/services.json"))
    raise NotFound(f"no run {text}; runs here: {', '.join(there) or 'none'}")


def address_of(run: str | None, service: str, given: str | None = None) -> str:
    """`given`, else the service's address in the run. Raises FailedPrecondition for a run that has ended.

    Raises Unavailable when nothing there speaks gRPC: a command's own deadline is as long as its longest work.
    """
    address = given or _address_in(find_run(run), service)
    asyncio.run(_require_answer(address, service))
    return address


async def _require_answer(address: str, service: str) -> None:
    for shard in address.split(","):
        async with connect(shard) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), _ANSWER_SECONDS)
            except TimeoutError as error:
                raise Unavailable(
                    f"no {service} service answers at {shard} within {_ANSWER_SECONDS:g} s: see `headrace status`"
                ) from error


def _address_in(folder: RunFolder, service: str) -> str:
    services = folder.services()
    if service not in services:
        raise NotFound(f"{folder.path} has no {service} service: its services are {', '.join(services) or 'none'}")
    entry = services[service]
    if entry.pid is not None and not folder.running_services():
        raise FailedPrecondition(
            f"{folder.path} has ended, and its {service} service with it: run the command that started it again, "
            "or read metrics.jsonl there and `headrace audit`"
        )
    return entry.address
