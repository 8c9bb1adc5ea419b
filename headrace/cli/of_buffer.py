"""Commands on one stream of a run's buffer: a run that lives, one that has ended, or a buffer by its address."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from headrace.cli.runs import find_run
from headrace.client.open import open_buffer
from headrace.client.port import Buffer
from headrace.launch.buffer_of_run import buffer_of_run

Command = Callable[[Buffer, argparse.Namespace], Awaitable[int]]


def add_buffer_command(parser: argparse.ArgumentParser, command: Command) -> None:
    """The arguments that say which stream, and the command to run with them."""
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="a run's folder or name; the newest if absent")
    parser.add_argument("--buffer-address", help="instead of a run")
    parser.add_argument("--stream", default="train")
    parser.set_defaults(run=lambda args: asyncio.run(_run(command, args)))


async def _run(command: Command, args: argparse.Namespace) -> int:
    if args.buffer_address:
        return await _at(args.buffer_address, command, args)
    async with buffer_of_run(find_run(args.run_name)) as address:
        return await _at(address, command, args)


async def _at(address: str, command: Command, args: argparse.Namespace) -> int:
    async with open_buffer(address) as buffer:
        return await command(buffer, args)
