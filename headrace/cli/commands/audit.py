"""`headrace audit [RUN]`: compares the ledger with itself and with the trainer's own record of what every step was fed.

A run that has ended is read by starting its buffer once more over a copy of its ledger; a run that lives is asked.
Nothing is written into the run's folder.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.runs import add_run_argument, find_run
from headrace.client.buffer import BufferClient
from headrace.errors import FailedPrecondition, NotFound
from headrace.launch.buffer_of_run import buffer_of_run
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger, damage_findings, read_ledger
from headrace.ledger_tools.audit.payloads import check_payloads
from headrace.ledger_tools.audit.record import Record, read_record
from headrace.ledger_tools.audit.verdict import AuditVerdict, verdict_of
from headrace.run_folder import RunFolder

_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Audit:
    """A verdict and the amounts it was made from."""

    verdict: AuditVerdict
    num_events: int
    num_steps: int
    num_samples: int
    num_payloads: int | None
    """None: they were not read."""


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
        "--timeout-seconds", type=_seconds, default=_TIMEOUT_SECONDS, help="how long to wait for a silent buffer (20)"
    )
    args = parser.parse_intermixed_args(argv)
    found = asyncio.run(audited(find_run(args.run), args.stream, args.timeout_seconds, deep=args.deep))
    print(described(found))
    return 0 if found.verdict.is_clean else 1


async def audited(
    folder: RunFolder, stream: str, timeout_seconds: float = _TIMEOUT_SECONDS, *, deep: bool = False
) -> Audit:
    """The audit of a run, alive or ended."""
    async with buffer_of_run(folder, read_only=True) as address:
        return await audit_ledger(address, stream, folder.training_record, timeout_seconds, deep=deep)


async def audit_ledger(
    address: str, stream: str, record_file: Path, timeout_seconds: float = _TIMEOUT_SECONDS, *, deep: bool = False
) -> Audit:
    """The audit of the buffers at these addresses. The record is read before the ledgers and after them."""
    ledgers: list[AuditedLedger] = []
    found: list[Finding] = []
    num_payloads = 0
    before = _lines_so_far(record_file)
    async with AsyncExitStack() as stack:
        for each in address.split(","):
            buffer = await stack.enter_async_context(BufferClient(each, deadline_seconds=timeout_seconds))
            ledgers.append(await read_ledger(buffer, stream, timeout_seconds))
            found += await damage_findings(buffer, stream)
            if deep:
                number, damaged = await check_payloads(buffer, ledgers[-1])
                num_payloads += number
                found += damaged
    record = _record_of(record_file, ledgers)
    verdict = verdict_of(ledgers, record, num_lines_before=before, found=found)
    return Audit(
        verdict,
        num_events=sum(ledger.position for ledger in ledgers),
        num_steps=len(record.last_lines),
        num_samples=sum(len(line.sample_ids) for line in record.last_lines.values()),
        num_payloads=num_payloads if deep else None,
    )


def _lines_so_far(record_file: Path) -> int:
    return len(read_record(record_file).lines) if record_file.is_file() else 0


def _record_of(record_file: Path, ledgers: Sequence[AuditedLedger]) -> Record:
    """Raises NotFound without a record, FailedPrecondition when neither it nor a ledger knows of any step."""
    consumed = sorted({step for ledger in ledgers for step, used in ledger.replay.steps.used.items() if used})
    if not record_file.is_file() and consumed:
        raise NotFound(
            f"{record_file} does not exist, and the ledger says that the steps {consumed[0]} to {consumed[-1]} were "
            "trained: without the trainer's record nothing can be audited; restore the file"
        )
    record = read_record(record_file)
    if not consumed and not record.lines and not record.findings:
        raise FailedPrecondition(
            f"nothing to audit: {record_file} has no line, and the ledger has consumed no step of stream "
            f"{ledgers[0].replay.config.name}; nothing was trained here yet"
        )
    return record


def described(found: Audit) -> str:
    """The line `lost, doubled, unaccounted: 0 0 0`, and one line for each finding."""
    verdict = found.verdict
    lists = {"lost": verdict.lost, "doubled": verdict.doubled, "unaccounted": verdict.unaccounted}
    payloads = "" if found.num_payloads is None else f"; {found.num_payloads} payloads are as they were put"
    return "\n".join(
        [
            f"{found.num_steps} steps were fed {found.num_samples} samples; the ledger has {found.num_events} events"
            + payloads,
            f"lost, doubled, unaccounted: {' '.join(str(len(ids)) for ids in lists.values())}",
            *(f"{name}: {sample_id}" for name, ids in lists.items() for sample_id in ids),
            *(f"{each.kind}: {each.what}" for each in verdict.others),
        ]
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
