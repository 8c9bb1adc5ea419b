"""`headrace buffer drop [RUN]`: drops groups so that they are never trained; batches with one of them are dissolved."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.ledger.of_buffer import add_stream_arguments, run_on_buffer
from headrace.client.buffer import Buffer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stream_arguments(parser)
    parser.add_argument(
        "--group", dest="groups", action="append", required=True, help="id of a group to drop; repeatable"
    )
    parser.add_argument("--reason", required=True, help="reason, recorded in the history")
    parser.add_argument("--dry-run", action="store_true", help="show the groups, and change nothing")


def run(args: argparse.Namespace) -> int:
    return run_on_buffer(_drop, args)


async def _drop(buffer: Buffer, args: argparse.Namespace) -> int:
    async for line in _described(buffer, args.stream, args.groups):
        print(line)
    if not args.dry_run:
        done = await buffer.drop_groups(args.stream, args.groups, args.reason)
        print(f"{done.num_groups} groups dropped, {done.num_batches} batches dissolved")
    return 0


async def _described(buffer: Buffer, stream: str, group_ids: Sequence[str]) -> AsyncIterator[str]:
    lost = {damage.group_id for damage in await buffer.damage()}
    for group_id in group_ids:  # one by one: an answer may be too short for several large groups
        found = (await buffer.list_groups(stream, group_ids=[group_id])).groups
        damaged = "its record is damaged" if group_id in lost else "the ledger has no such group"
        yield f"{group_id}  {_state(found[0]) if found else damaged}"


def _state(group: pb.Group) -> str:
    state = pb.GroupState.Name(group.state).removeprefix("GROUP_STATE_")
    return f"{state}, in the batch of step {group.step}" if group.HasField("step") else state
