"""`headrace samples [RUN] [-n 5]`: the newest rollouts, as they were answered and judged."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from headrace.api.buffer.v1 import buffer_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.cli.words import count, text
from headrace.client.open import open_buffer
from headrace.trajectory import Sample

_WITH_PAYLOAD = (buffer_pb2.GROUP_STATE_READY, buffer_pb2.GROUP_STATE_CONSUMED)


def samples(argv: Sequence[str]) -> int:
    """Prints `-n` samples, newest group first."""
    parser = argparse.ArgumentParser(prog="headrace samples")
    add_run_argument(parser)
    parser.add_argument("-n", type=count, default=5, help="samples at most")
    parser.add_argument("--stream", type=text, default="train")
    parser.add_argument("--buffer-address", help="instead of a run; of a sharded ledger all, with commas")
    args = parser.parse_args(argv)
    address = address_of(args.run, "buffer", args.buffer_address)
    found = asyncio.run(_newest(address, args.stream, args.n))
    console = Console()
    for sample in found:
        console.print(described(sample), highlight=False, soft_wrap=True)
    if not found:
        console.print("no samples are held now: committed ones are gone, see metrics.jsonl for what they were")
    return 0


async def _newest(address: str, stream: str, limit: int) -> list[Sample]:
    async with open_buffer(address) as buffer:
        page = await buffer.list_groups(stream, _WITH_PAYLOAD, page_size=max(1, min(limit, 1000)))
        ids = [envelope.sample_id for group in page.groups for envelope in group.samples]
        return [Sample.unpack(packed) for packed in await buffer.fetch_samples(stream, ids[:limit])]


def described(sample: Sample) -> str:
    """A sample for a person, in rich's markup."""
    versions = ", ".join(f"{each.policy_version} [{each.start}:{each.end}]" for each in sample.policy_ranges)
    if sample.failure:
        judged = f"[red]failed[/]: {escape(sample.failure.reason)}: {escape(sample.failure.message)}"
    elif sample.reward is None:
        judged = "not judged"
    else:
        judged = f"reward [bold]{sample.reward:.3g}[/] by {escape(sample.scorer)} {escape(sample.scorer_version)}"
    label = f", label {escape(sample.label)}" if sample.label is not None else ""
    return (
        f"[dim]── {sample.sample_id}, {sample.status.value}, {sample.response_length} tokens, "
        f"policy version {escape(versions) or '–'}[/]\n"
        f"{escape(sample.prompt)}[cyan]{escape(sample.response)}[/]\n{judged}{label}\n"
    )
