"""`headrace buffer …`, `headrace submit` and `headrace audit`: the ledger as files, groups, streams and history."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import click

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.arg_types import (
    PATH,
    TEXT,
    Finite,
    Group,
    buffer_address_option,
    json_option,
    print_json,
    run_argument,
    stream_option,
)
from headrace.cli.runs import address_of, find_run
from headrace.client.buffer import BufferClient
from headrace.client.open import Buffer, open_buffer
from headrace.errors import DataLoss, InvalidArgument
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.ledger_tools.audit_run import TIMEOUT_SECONDS, Audit, audit_ledger, described
from headrace.ledger_tools.backup import Backup, require_new, restore_backup, write_backup
from headrace.ledger_tools.export import export_parquet, pages
from headrace.limits import canonical, to_json
from headrace.process.child import run_once
from headrace.prompts import content_of, parse_row, rows_of, set_content, set_label
from headrace.run_folder import RunFolder
from headrace.sample_log import SampleLog

_MAX_LISTED = 20
_PAGE = 1_000
_PROMPTS_AT_ONCE = 500


@click.group(cls=Group)
def buffer() -> None:
    """Backs up, restores or exports a ledger; retries or drops groups; deletes a stream."""


@asynccontextmanager
async def _buffer_of(run: str | None, buffer_address: str | None) -> AsyncIterator[Buffer]:
    """The buffer of a live run, or at an address; that of a run that has ended is started meanwhile."""
    if buffer_address:
        async with open_buffer(buffer_address) as opened:
            yield opened
        return
    async with buffer_of_run(find_run(run)) as address, open_buffer(address) as opened:
        yield opened


@buffer.command()
@click.argument("address")
@click.argument("folder", type=PATH)
def backup(address: str, folder: Path) -> int:
    """Writes a consistent copy of the live ledger at ADDRESS (host:port) into FOLDER, which must be new."""
    require_new(folder)
    if "," in address:
        raise InvalidArgument(
            f"{address} are the shards of one ledger, and a backup is of one of them: call it for each address, "
            "with a folder for each"
        )
    written = asyncio.run(_copy(address, folder))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-verified-") as scratch:
        there = _restored(folder, Path(scratch) / "ledger")
    print(
        f"{folder}: {len(written.files)} files, {written.num_bytes} bytes, up to position {written.position}; "
        f"{there['samples']} samples, every one read back"
    )
    return 0


async def _copy(address: str, folder: Path) -> Backup:
    async with BufferClient(address) as client:
        await client.position()  # a buffer that is not there is told at once, and by its address
        return await write_backup(client.backup(), folder)


@buffer.command()
@click.argument("backup", type=PATH)
@click.argument("ledger", type=PATH)
def restore(backup: Path, ledger: Path) -> int:
    """Makes LEDGER, a new folder such as runs/NAME/ledger, from a backup's folder, and verifies all of it."""
    there = _restored(backup, ledger)
    print(
        f"{ledger}: buffer_store {there['store']}, {there['groups']} groups, {there['events']} events, "
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


@buffer.command("delete-stream")
@click.argument("address")
@click.argument("stream")
@click.option("--force", is_flag=True, help="Delete also when groups are queued, leased, ready or consumed.")
def delete_stream(address: str, stream: str, force: bool) -> int:
    """Deletes a stream with its groups, samples and columns.

    ADDRESS is host:port of the buffer; for a sharded ledger all addresses, separated by commas.
    """

    async def deleted() -> bool:
        async with open_buffer(address) as opened:
            return await opened.delete_stream(stream, force=force)

    print(f"{stream}: {'deleted' if asyncio.run(deleted()) else 'the buffer has no such stream'}")
    return 0


@buffer.command()
@run_argument
@buffer_address_option
@stream_option
@click.option("--parquet", type=PATH, required=True, help="The file to write.")
def export(run: str | None, buffer_address: str | None, stream: str, parquet: Path) -> int:
    """Writes Parquet with one row for each sample."""

    async def exported() -> int:
        if buffer_address:
            return await export_parquet(buffer_address, stream, parquet)
        folder = find_run(run)
        async with buffer_of_run(folder) as address:
            return await export_parquet(address, stream, parquet, SampleLog(folder.samples))

    print(f"{parquet}: {asyncio.run(exported())} samples")
    return 0


@buffer.command()
@run_argument
@buffer_address_option
@stream_option
@click.option("--group", "groups", multiple=True, help="Queue only the group with this id; repeatable.")
@click.option("--dry-run", is_flag=True, help="Show what failed, and change nothing.")
def retry(run: str | None, buffer_address: str | None, stream: str, groups: Sequence[str], dry_run: bool) -> int:
    """Lists the reasons why groups failed, and queues those groups again, with all of their attempts."""

    async def retried() -> None:
        async with _buffer_of(run, buffer_address) as opened:
            for reason, number in (await _reasons(opened, stream)).most_common():
                print(f"{number:6} FAILED  {reason}")
            if not dry_run:
                print(f"{await _queued(opened, stream, groups)} groups queued again")

    asyncio.run(retried())
    return 0


async def _reasons(buffer: Buffer, stream: str) -> Counter[str]:
    """Counts the groups that failed, by reason and message."""
    reasons = Counter[str]()
    async for page in pages(buffer, stream, _PAGE, [pb.GROUP_STATE_FAILED]):
        reasons.update(f"{group.failure.reason}: {group.failure.message}" for group in page)
    return reasons


async def _queued(buffer: Buffer, stream: str, groups: Sequence[str]) -> int:
    if groups:
        return (await buffer.retry_groups(stream, groups)).num_groups
    queued = 0
    while True:
        reply = await buffer.retry_groups(stream)
        queued += reply.num_groups
        if not reply.num_groups or not reply.num_failed:
            return queued


@buffer.command()
@run_argument
@buffer_address_option
@stream_option
@click.option("--group", "groups", multiple=True, required=True, help="Id of a group to drop; repeatable.")
@click.option("--reason", required=True, help="Reason, recorded in the history.")
@click.option("--dry-run", is_flag=True, help="Show the groups, and change nothing.")
def drop(
    run: str | None, buffer_address: str | None, stream: str, groups: Sequence[str], reason: str, dry_run: bool
) -> int:
    """Drops groups, so that they are never trained. Batches with one of them are dissolved."""

    async def dropped() -> None:
        async with _buffer_of(run, buffer_address) as opened:
            async for line in _described_groups(opened, stream, groups):
                print(line)
            if not dry_run:
                done = await opened.drop_groups(stream, groups, reason)
                print(f"{done.num_groups} groups dropped, {done.num_batches} batches dissolved")

    asyncio.run(dropped())
    return 0


async def _described_groups(buffer: Buffer, stream: str, group_ids: Sequence[str]) -> AsyncIterator[str]:
    lost = {damage.group_id for damage in await buffer.damage()}
    for group_id in group_ids:  # one by one: an answer may be too short for several large groups
        found = (await buffer.list_groups(stream, group_ids=[group_id])).groups
        damaged = "its record is damaged" if group_id in lost else "the ledger has no such group"
        yield f"{group_id}  {_state(found[0]) if found else damaged}"


def _state(group: pb.Group) -> str:
    state = pb.GroupState.Name(group.state).removeprefix("GROUP_STATE_")
    return f"{state}, in the batch of step {group.step}" if group.HasField("step") else state


@click.command()
@run_argument
@buffer_address_option
@stream_option
@click.option("--prompt", type=TEXT, help="One prompt.")
@click.option("--file", type=PATH, help="JSONL: prompt (text or messages), label, metadata.")
@click.option("--label", type=TEXT, help="The reference answer of --prompt.")
@click.option("--chat", is_flag=True, help="Text prompts become one user turn of the chat template.")
@click.option("--ids", is_flag=True, help="Print only the groups' ids, one for each prompt, for scripts.")
def submit(
    run: str | None,
    buffer_address: str | None,
    stream: str,
    prompt: str | None,
    file: Path | None,
    label: str | None,
    chat: bool,
    ids: bool,
) -> int:
    """Brings prompts to a stream of a running buffer. A file that is submitted twice makes its groups once."""
    if (prompt is None) == (file is None):
        raise click.UsageError("either --prompt TEXT or --file PATH is needed, and not both")
    address = address_of(run, "buffer", buffer_address)
    if file is not None:
        prompts = prompts_of(file, chat)
    else:
        row = {"prompt": prompt} | ({"label": label} if label is not None else {})
        prompts = iter([prompt_of(row, f"cli-{uuid.uuid4().hex}", chat)])
    count, first = asyncio.run(_submit(address, stream, prompts, ids))
    if not ids:
        print(_sentence(count, first, stream))
    return 0


def _sentence(count: int, first: str, stream: str) -> str:
    if count == 0:
        return "the file has no prompt: nothing was queued"
    if count == 1:
        return f"1 prompt is queued in stream {stream} as group {first}: see headrace samples --group {first}"
    return f"{count} prompts are queued in stream {stream}, the first as group {first}; --ids lists all of them"


async def _submit(address: str, stream: str, prompts: Iterator[sample_pb2.Prompt], prints_ids: bool) -> tuple[int, str]:
    """Returns the number of prompts and the first one's group."""
    count, first = 0, ""
    async with open_buffer(address) as opened:
        while some := list(islice(prompts, _PROMPTS_AT_ONCE)):
            group_ids = await opened.submit_prompts(stream, some)
            first = first or group_ids[0]
            count += len(group_ids)
            if prints_ids:
                print("\n".join(group_ids))
    return count, first


def prompts_of(path: Path, chat: bool) -> Iterator[sample_pb2.Prompt]:
    """Yields one prompt for each row of a file. Raises InvalidArgument that names file and line."""
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist")
    with path.open("rb") as file:
        for number, row in rows_of(file, path):
            line = row.strip() if isinstance(row, bytes) else canonical(row).encode()
            digest = hashlib.sha256(line).hexdigest()[:16]
            try:
                yield prompt_of(parse_row(row), f"{path.name}:{number}:{digest}", chat)
            except InvalidArgument as error:
                raise InvalidArgument(f"{path}, line {number}: {error}") from error


def prompt_of(row: Mapping[str, Any], prompt_id: str, chat: bool) -> sample_pb2.Prompt:
    """Reads a JSON object with `prompt` and optional `label` and `metadata`."""
    label, metadata = row.get("label"), row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise InvalidArgument(f'"metadata" is {type(metadata).__name__}, must be an object')
    prompt = sample_pb2.Prompt(prompt_id=prompt_id, metadata_json=to_json(metadata))
    set_label(prompt, label)
    content = content_of(row, "prompt")
    set_content(prompt, [{"role": "user", "content": content}] if isinstance(content, str) and chat else content)
    return prompt


@click.command()
@run_argument
@stream_option
@click.option("--deep", is_flag=True, help="Also read every payload that the ledger still has.")
@click.option(
    "--timeout-seconds",
    type=Finite(sys.float_info.max, above_zero=True),
    default=TIMEOUT_SECONDS,
    help="How long to wait for a silent buffer (20).",
)
@json_option
def audit(run: str | None, stream: str, deep: bool, timeout_seconds: float, as_json: bool) -> int:
    """Compares the ledger with itself and with trained.jsonl, the trainer's own record of what every step was fed.

    A run that has ended is read by starting its buffer once more over a copy of its ledger. Nothing is written into
    the run's folder. The exit code is 0 when the ledger is clean, 1 when stdout has findings or stderr says why nothing
    could be audited, and 2 for a mistake in the command.
    """
    found = asyncio.run(audited(find_run(run), stream, timeout_seconds, deep=deep))
    if as_json:
        print_json({"clean": found.verdict.is_clean, **asdict(found)})
    else:
        print(described(found))
    return 0 if found.verdict.is_clean else 1


async def audited(
    folder: RunFolder, stream: str, timeout_seconds: float = TIMEOUT_SECONDS, *, deep: bool = False
) -> Audit:
    async with buffer_of_run(folder, read_only=True) as address:
        return await audit_ledger(address, stream, folder.training_record, timeout_seconds, deep=deep)
