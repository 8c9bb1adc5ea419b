"""`headrace audit [RUN]`: the ledger against the trainer's own record of what every step was fed.

A run that has ended is read by starting its buffer once more over its folder; a run that lives is asked.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.audit.ledger import read_history, read_kept
from headrace.audit.record import read_record
from headrace.audit.verdict import Verdict, judge
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
    async with buffer_of_run(folder) as address, BufferClient(address) as buffer:
        while True:
            before = read_record(folder.training_record)
            history = await read_history(buffer, stream)
            kept = await read_kept(buffer, stream, history)
            fed = read_record(folder.training_record)
            if (await buffer.stats(stream)).epoch == history.epoch:  # no trainer has begun again meanwhile
                break
    fed = {step: ids for step, ids in fed.items() if step < history.next_step or step in before}
    num_samples = sum(map(len, fed.values()))
    return Audit(judge(history, kept, fed), history.position, len(fed), num_samples)


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
