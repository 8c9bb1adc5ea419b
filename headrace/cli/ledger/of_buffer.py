"""Runs a command on one stream of a buffer: of a live run, of a run that has ended, or by address."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from headrace.cli.runs import add_run_argument, find_run
from headrace.client.buffer import Buffer
from headrace.client.open import open_buffer
from headrace.launch.buffer_of_run import buffer_of_run

Command = Callable[[Buffer, argparse.Namespace], Awaitable[int]]


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "--buffer-address",
        help="host:port of the buffer, instead of a run; for a sharded ledger all addresses, separated by commas",
    )
    parser.add_argument("--stream", default="train")


def run_on_buffer(command: Command, args: argparse.Namespace) -> int:
    """Returns the command's exit code. The buffer of a run that has ended is started for the command's duration."""
    return asyncio.run(_run(command, args))


async def _run(command: Command, args: argparse.Namespace) -> int:
    if args.buffer_address:
        return await _at(args.buffer_address, command, args)
    async with buffer_of_run(find_run(args.run)) as address:
        return await _at(address, command, args)


async def _at(address: str, command: Command, args: argparse.Namespace) -> int:
    async with open_buffer(address) as buffer:
        return await command(buffer, args)
