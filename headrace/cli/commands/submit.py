"""`headrace submit --prompt TEXT | --file PATH`: brings prompts to a stream of a running buffer."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.client.open import open_buffer
from headrace.errors import InvalidArgument
from headrace.limits import canonical, to_json
from headrace.prompts import chat_message, content_of, parse_row, rows_of, set_label

_AT_ONCE = 500


def submit(argv: Sequence[str]) -> int:
    """Says what became of the prompts. A file that is submitted twice makes its groups once."""
    parser = argparse.ArgumentParser(prog="headrace submit")
    add_run_argument(parser)
    parser.add_argument(
        "--buffer-address",
        help="host:port of the buffer, instead of a run; for a sharded ledger all addresses, separated by commas",
    )
    parser.add_argument("--stream", default="train")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one prompt")
    source.add_argument("--file", type=Path, help="JSONL: prompt (text or messages), label, metadata")
    parser.add_argument("--label", help="the reference answer of --prompt")
    parser.add_argument("--chat", action="store_true", help="text prompts become one user turn of the chat template")
    parser.add_argument(
        "--ids", action="store_true", help="print only the groups' ids, one for each prompt, for scripts"
    )
    args = parser.parse_intermixed_args(argv)
    address = address_of(args.run, "buffer", args.buffer_address)
    if args.file:
        prompts = prompts_of(args.file, args.chat)
    else:
        row = {"prompt": args.prompt} | ({"label": args.label} if args.label is not None else {})
        prompts = iter([prompt_of(row, f"cli-{uuid.uuid4().hex}", args.chat)])
    count, first = asyncio.run(_submit(address, args.stream, prompts, args.ids))
    if not args.ids:
        print(_sentence(count, first, args.stream))
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
    async with open_buffer(address) as buffer:
        while some := list(islice(prompts, _AT_ONCE)):
            group_ids = await buffer.submit_prompts(stream, some)
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
    if isinstance(content, str) and not chat:
        prompt.text = content
    else:
        turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
        prompt.messages.messages.extend(map(chat_message, turns))
    return prompt
