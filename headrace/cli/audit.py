"""`headrace audit [RUN]`: the ledger against the trainer's own record of what every step was fed.

A run that has ended is read by starting its buffer once more over its folder; a run that lives is asked.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from headrace.audit.ledger import read_history, read_kept
from headrace.audit.record import read_record
from headrace.audit.verdict import Verdict, judge_shards
from headrace.cli.runs import add_run_argument, find_run
from headrace.client.buffer import BufferClient
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.launch.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Audit:
    """A verdict and what it was made of."""

    verdict: Verdict
    num_events: int
    num_steps: int
    num_samples: int


def audit(argv: Sequence[str]) -> int:
    """Prints lost, doubled, unaccounted; 1 unless all are 0."""
    parser = argparse.ArgumentParser(prog="headrace audit")
    add_run_argument(parser)
    parser.add_argument("--stream", default="train")
    args = parser.parse_args(argv)
    found = asyncio.run(audited(find_run(args.run), args.stream))
    print(described(found))
    return 0 if found.verdict.is_clean else 1


async def audited(folder: RunFolder, stream: str) -> Audit:
    """The audit of a run, alive or ended."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(buffer_of_run(folder))
        shards = [await stack.enter_async_context(BufferClient(each)) for each in address.split(",")]
        while True:
            before = read_record(folder.training_record)
            histories = [await read_history(shard, stream) for shard in shards]
            kept = [await read_kept(shard, stream, h) for shard, h in zip(shards, histories, strict=True)]
            fed = read_record(folder.training_record)
            epochs = [(await shard.stats(stream)).epoch for shard in shards]
            if epochs == [history.epoch for history in histories]:  # no trainer has begun again meanwhile
                break
    next_step = min(history.next_step for history in histories)
    fed = {step: ids for step, ids in fed.items() if step < next_step or step in before}
    verdict = judge_shards(list(zip(histories, kept, strict=True)), fed)
    num_events, num_samples = sum(history.position for history in histories), sum(map(len, fed.values()))
    return Audit(verdict, num_events, len(fed), num_samples)


def described(found: Audit) -> str:
    """`lost, doubled, unaccounted: 0 0 0`, and the ids where there are any."""
    verdict = found.verdict
    lists = {"lost": verdict.lost, "doubled": verdict.doubled, "unaccounted": verdict.unaccounted}
    return "\n".join(
        [
            f"{found.num_steps} steps were fed {found.num_samples} samples; the ledger has {found.num_events} events",
            f"lost, doubled, unaccounted: {' '.join(str(len(ids)) for ids in lists.values())}",
            *(f"{name}: {sample_id}" for name, ids in lists.items() for sample_id in ids),
        ]
    )
