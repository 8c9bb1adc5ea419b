"""`headrace audit [RUN]`: compares the ledger with itself and with the trainer's own record of what every step was fed.

A run that has ended is read by starting its buffer once more over a copy of its ledger; a run that lives is asked.
Nothing is written into the run's folder.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from headrace.cli.runs import add_run_argument, find_run
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.ledger_tools.audit_run import TIMEOUT_SECONDS, Audit, audit_ledger, described
from headrace.run_folder import RunFolder


def audit(argv: Sequence[str]) -> int:
    """Returns 0 when nothing was found; 1 when something was, or when nothing could be audited (stderr says why)."""
    parser = argparse.ArgumentParser(
        prog="headrace audit",
        description="Compares the ledger's history with itself and with trained.jsonl. Exit code 0: clean; 1: "
        "stdout has findings, or stderr says why nothing could be audited; 2: a mistake in the command.",
    )
    add_run_argument(parser)
    parser.add_argument("--stream", default="train")
    parser.add_argument("--deep", action="store_true", help="also read every payload that the ledger still has")
    parser.add_argument(
        "--timeout-seconds", type=_seconds, default=TIMEOUT_SECONDS, help="how long to wait for a silent buffer (20)"
    )
    args = parser.parse_intermixed_args(argv)
    found = asyncio.run(audited(find_run(args.run), args.stream, args.timeout_seconds, deep=args.deep))
    print(described(found))
    return 0 if found.verdict.is_clean else 1


async def audited(
    folder: RunFolder, stream: str, timeout_seconds: float = TIMEOUT_SECONDS, *, deep: bool = False
) -> Audit:
    """The audit of a run, alive or ended."""
    async with buffer_of_run(folder, read_only=True) as address:
        return await audit_ledger(address, stream, folder.training_record, timeout_seconds, deep=deep)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
