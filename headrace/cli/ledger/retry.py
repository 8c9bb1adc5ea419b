"""`headrace buffer retry [RUN]`: lists the reasons why groups failed, and queues those groups again."""

from __future__ import annotations

import argparse
from collections import Counter

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.cli.ledger.of_buffer import add_stream_arguments, run_on_buffer
from headrace.client.buffer import Buffer

_PAGE = 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stream_arguments(parser)
    parser.add_argument(
        "--group", dest="groups", action="append", default=[], help="queue only the group with this id; repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what failed, and change nothing")


def run(args: argparse.Namespace) -> int:
    return run_on_buffer(_retry, args)


async def _retry(buffer: Buffer, args: argparse.Namespace) -> int:
    for reason, number in (await _reasons(buffer, args.stream)).most_common():
        print(f"{number:6} FAILED  {reason}")
    if not args.dry_run:
        print(f"{await _queued(buffer, args.stream, args.groups)} groups queued again")
    return 0


async def _reasons(buffer: Buffer, stream: str) -> Counter[str]:
    """Counts the groups that failed, by reason and message."""
    reasons, token = Counter[str](), ""
    while True:
        page = await buffer.list_groups(stream, [pb.GROUP_STATE_FAILED], page_size=_PAGE, page_token=token)
        reasons.update(f"{group.failure.reason}: {group.failure.message}" for group in page.groups)
        token = page.next_page_token
        if not token:
            return reasons


async def _queued(buffer: Buffer, stream: str, groups: list[str]) -> int:
    if groups:
        return (await buffer.retry_groups(stream, groups)).num_groups
    queued = 0
    while True:
        reply = await buffer.retry_groups(stream)
        queued += reply.num_groups
        if not reply.num_groups or not reply.num_failed:
            return queued
