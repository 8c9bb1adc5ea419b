"""`headrace buffer backup | restore | export | retry | drop | delete-stream`: the ledger as files, groups, streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.backup import Backup, require_new, restore_backup, write_backup
from headrace.cli import drop, retry
from headrace.cli.runs import find_run
from headrace.client.buffer import BufferClient
from headrace.client.open import open_buffer
from headrace.errors import DataLoss
from headrace.export import export_parquet
from headrace.launch.buffer_of_run import buffer_of_run

_MAX_LISTED = 20


def buffer(argv: Sequence[str]) -> int:
    """Does one of them."""
    parser = argparse.ArgumentParser(prog="headrace buffer")
    commands = parser.add_subparsers(required=True, metavar="backup | restore | export | retry | drop | delete-stream")
    backup = commands.add_parser("backup", help="a consistent copy of a ledger that goes on serving")
    backup.add_argument("address", help="host:port of the buffer")
    backup.add_argument("folder", type=Path, help="a new folder")
    backup.set_defaults(run=_backup)
    restore = commands.add_parser("restore", help="a ledger's folder from a backup, opened and read to the end")
    restore.add_argument("backup", type=Path, help="the backup's folder")
    restore.add_argument("ledger", type=Path, help="a new folder, e.g. runs/NAME/ledger")
    restore.set_defaults(run=_restore)
    export = commands.add_parser("export", help="one row a sample, for DuckDB, pandas and offline training")
    export.add_argument("run_name", nargs="?", metavar="RUN", help="a run's folder or name; the newest if absent")
    export.add_argument("--buffer-address", help="instead of a run")
    export.add_argument("--stream", default="train")
    export.add_argument("--parquet", type=Path, required=True, help="the file to write")
    export.set_defaults(run=_export)
    delete = commands.add_parser("delete-stream", help="a stream with its groups, samples and columns")
    delete.add_argument("address", help="host:port of the buffer; of a sharded ledger all, with commas")
    delete.add_argument("stream")
    delete.add_argument("--force", action="store_true", help="also where groups are queued, leased, ready or consumed")
    delete.set_defaults(run=_delete_stream)
    retry.add_arguments(commands.add_parser("retry", help="FAILED groups go back to producers, their attempts anew"))
    drop.add_arguments(commands.add_parser("drop", help="groups that shall never be trained are taken out"))
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


def _backup(args: argparse.Namespace) -> int:
    require_new(args.folder)
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
    """What the restored ledger holds. Raises DataLoss when it cannot be read whole."""
    store = restore_backup(backup, ledger).store
    command = [sys.executable, "-m", "services.buffer.verify", store, str(ledger)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    if not verified.stdout:
        raise DataLoss(f"the backup {backup} makes no ledger that can be opened: {verified.stderr.strip()}")
    there: dict[str, Any] = json.loads(verified.stdout.splitlines()[-1])
    if there["damaged"]:
        listed = "\n".join(there["damaged"][:_MAX_LISTED])
        raise DataLoss(
            f"the backup {backup} was written and lacks {len(there['damaged'])} things that are damaged in the ledger "
            f"itself; the rest is there:\n{listed}"
        )
    return {**there, "store": store}


def _delete_stream(args: argparse.Namespace) -> int:
    deleted = asyncio.run(_deleted(args.address, args.stream, args.force))
    print(f"{args.stream}: {'deleted' if deleted else 'was not there'}")
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
    async with buffer_of_run(find_run(args.run_name)) as address:
        return await export_parquet(address, args.stream, args.parquet)
