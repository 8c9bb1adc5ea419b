"""`headrace buffer backup | restore | export | retry | drop | delete-stream`: the ledger as files, groups, streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.ledger import drop, retry
from headrace.cli.ledger.of_buffer import add_stream_arguments
from headrace.cli.runs import find_run
from headrace.client.buffer import BufferClient
from headrace.client.open import open_buffer
from headrace.errors import DataLoss, InvalidArgument
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.ledger_tools.backup import Backup, require_new, restore_backup, write_backup
from headrace.ledger_tools.export import export_parquet
from headrace.limits import did_you_mean
from headrace.process.child import run_once
from headrace.sample_log import SampleLog

_MAX_LISTED = 20


def buffer(argv: Sequence[str]) -> int:
    """Runs the subcommand that the first word names."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, words = argv[0], argv[1:]
    if name not in _COMMANDS:
        raise InvalidArgument(f"unknown command buffer {name[:80]}{did_you_mean(name, _COMMANDS)}\n{_overview()}")
    command = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"headrace buffer {name}", description=command.help)
    command.add_arguments(parser)
    return command.run(parser.parse_intermixed_args(words))


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", help="host:port of the buffer")
    parser.add_argument("folder", type=Path, help="a new folder")


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=Path, help="the backup's folder")
    parser.add_argument("ledger", type=Path, help="a new folder, e.g. runs/NAME/ledger")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add_stream_arguments(parser)
    parser.add_argument("--parquet", type=Path, required=True, help="the file to write")


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", help="host:port of the buffer; for a sharded ledger all addresses, separated by commas"
    )
    parser.add_argument("stream")
    parser.add_argument(
        "--force", action="store_true", help="delete also when groups are queued, leased, ready or consumed"
    )


def _backup(args: argparse.Namespace) -> int:
    require_new(args.folder)
    if "," in args.address:
        raise InvalidArgument(
            f"{args.address} are the shards of one ledger, and a backup is of one of them: call it for each address, "
            "with a folder for each"
        )
    backup = asyncio.run(_copy(args.address, args.folder))
    with tempfile.TemporaryDirectory(dir=args.folder.parent, prefix=f"{args.folder.name}-verified-") as scratch:
        there = _restored(args.folder, Path(scratch) / "ledger")
    print(
        f"{args.folder}: {len(backup.files)} files, {backup.num_bytes} bytes, up to position {backup.position}; "
        f"{there['samples']} samples, every one read back"
    )
    return 0


async def _copy(address: str, folder: Path) -> Backup:
    async with BufferClient(address) as client:
        await client.position()  # a buffer that is not there is told at once, and by its address
        return await write_backup(client.backup(), folder)


def _restore(args: argparse.Namespace) -> int:
    there = _restored(args.backup, args.ledger)
    print(
        f"{args.ledger}: buffer_store {there['store']}, {there['groups']} groups, {there['events']} events, "
        f"{there['samples']} samples with {there['payload_bytes']} bytes, every one read"
    )
    return 0


def _restored(backup: Path, ledger: Path) -> dict[str, Any]:
    """Restores the backup and returns what the new ledger holds. Raises DataLoss when it cannot be read whole."""
    store = restore_backup(backup, ledger).store
    command = [sys.executable, "-m", "services.buffer.verify", store, str(ledger)]
    verified = asyncio.run(run_once(command, os.environ))
    if not verified.out:
        raise DataLoss(f"the backup {backup} cannot be opened as a ledger: {'; '.join(verified.last_lines)}")
    there: dict[str, Any] = json.loads(verified.out.splitlines()[-1])
    if there["damaged"]:
        listed = "\n".join(there["damaged"][:_MAX_LISTED])
        raise DataLoss(
            f"the backup {backup} lacks {len(there['damaged'])} records or payloads that are damaged in the ledger "
            f"itself; it holds all others:\n{listed}"
        )
    return {**there, "store": store}


def _delete_stream(args: argparse.Namespace) -> int:
    deleted = asyncio.run(_deleted(args.address, args.stream, args.force))
    print(f"{args.stream}: {'deleted' if deleted else 'the buffer has no such stream'}")
    return 0


async def _deleted(address: str, stream: str, force: bool) -> bool:
    async with open_buffer(address) as buffer:
        return await buffer.delete_stream(stream, force=force)


def _export(args: argparse.Namespace) -> int:
    num_rows = asyncio.run(_exported(args))
    print(f"{args.parquet}: {num_rows} samples")
    return 0


async def _exported(args: argparse.Namespace) -> int:
    if args.buffer_address:
        return await export_parquet(args.buffer_address, args.stream, args.parquet)
    run = find_run(args.run)
    async with buffer_of_run(run) as address:
        return await export_parquet(address, args.stream, args.parquet, SampleLog(run.samples))


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str


_COMMANDS: Mapping[str, _Command] = {
    "backup": _Command(_backup, _backup_arguments, "write a consistent copy of a live ledger"),
    "restore": _Command(_restore, _restore_arguments, "make a ledger's folder from a backup, and verify all of it"),
    "export": _Command(_export, _export_arguments, "write Parquet with one row for each sample"),
    "retry": _Command(retry.run, retry.add_arguments, "queue FAILED groups again, with all of their attempts"),
    "drop": _Command(drop.run, drop.add_arguments, "drop groups, so that they are never trained"),
    "delete-stream": _Command(_delete_stream, _delete_arguments, "delete a stream with groups, samples and columns"),
}


def _overview() -> str:
    lines = [f"  headrace buffer {name:<14} {command.help}" for name, command in _COMMANDS.items()]
    return "\n".join(["usage:", *lines, "", "headrace buffer COMMAND --help lists its arguments."])
