"""Reads what an audit compares: a stream of each shard, its payloads, the record. Every wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    NotFound,
    OutOfRange,
    Unavailable,
)
from headrace.ledger_tools.audit import (
    CONSUMED,
    READY,
    AuditedLedger,
    AuditVerdict,
    Finding,
    Record,
    Replay,
    read_record,
    verdict_of,
)
from headrace.ledger_tools.export import pages
from headrace.trajectory import check_payload

_PAGE = 1_000
_RETRY_SECONDS = 0.2


async def read_ledger(buffer: BufferClient, stream: str, silence_seconds: float) -> AuditedLedger:
    """Raises OutOfRange when the history's beginning is deleted, Unavailable when the buffer is silent for so long."""
    try:
        config = await _config(buffer, stream)
        end = await buffer.position()
        replay = await _replay(buffer, config, end, silence_seconds)
        groups = await _groups(buffer, replay)
        await _pass_over_forgotten(buffer, replay, groups, end, silence_seconds)
        stats = await buffer.stats(stream)
        return AuditedLedger(replay, end, groups, stats if await buffer.position() == end else None)
    except (TimeoutError, DeadlineExceeded, Unavailable) as error:
        why = f": {error.message}" if isinstance(error, Unavailable) else ""
        raise Unavailable(
            f"the buffer at {buffer.address} does not answer within {silence_seconds:g} s{why}; see whether it runs "
            "(headrace status), or give it more time with --timeout-seconds"
        ) from error


async def damage_findings(buffer: BufferClient, stream: str) -> list[Finding]:
    """What the buffer has found damaged on its disk, unless it belongs to another stream."""
    own = [one for one in await buffer.damage() if not one.group_id or one.group_id.rpartition("/")[0] == stream]
    return [Finding("damage", damage_line(one)) for one in own]


def damage_line(damage: pb.Damage) -> str:
    parts = [("group", damage.group_id), ("sample", damage.sample_id)]
    named = ", ".join(f"{kind} {name}" for kind, name in parts if name)
    return f"{damage.what} ({named})" if named else damage.what


async def _config(buffer: BufferClient, stream: str) -> pb.StreamConfig:
    configs = {config.name: config for config in await buffer.list_streams()}
    if stream not in configs:
        raise NotFound(f"there is no stream {stream!r} to audit; there are {sorted(configs)}")
    return configs[stream]


async def _replay(buffer: BufferClient, config: pb.StreamConfig, end: int, silence_seconds: float) -> Replay:
    replay, position = Replay(config), 0
    async for event in _events(buffer, end, silence_seconds, replay):
        if event.position != position + 1:
            missing = f"{position + 1} to {event.position - 1}"
            replay.findings.append(Finding("history", f"has no events at the positions {missing}"))
        position = event.position
        if event.stream == config.name:
            replay.add(event)
            if event.kind == "stream_deleted":  # one of this name that comes later goes on with its epochs
                replay = Replay(config, findings=replay.findings)
                replay.steps.epoch = event.epoch
    if position < end:
        replay.findings.append(Finding("history", f"has no events at the positions {position + 1} to {end}"))
    replay.finish()
    return replay


async def _events(
    buffer: BufferClient, end: int, silence_seconds: float, replay: Replay, following: int = 1
) -> AsyncIterator[pb.LedgerEvent]:
    """Yields all streams' events up to a position. After an interruption it watches again, behind damaged events."""
    while following <= end:
        try:
            async with aclosing(_watched(buffer, following, silence_seconds)) as events:
                async for event in events:
                    if event.position > end:
                        return
                    yield event
                    following = event.position + 1
                    if event.position == end:
                        return
        except DataLoss as error:
            replay.findings.append(Finding("history", f"is damaged: {error.message}"))
            following = int(error.metadata.get("next_position", end + 1))
        except OutOfRange as error:
            if "position" not in error.metadata:  # not cut off for being slow: the beginning is deleted
                raise
        except Unavailable:
            await asyncio.sleep(_RETRY_SECONDS)
            await buffer.position()  # raises when it does not come back in time


async def _watched(buffer: BufferClient, first: int, silence_seconds: float) -> AsyncGenerator[pb.LedgerEvent]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(silence_seconds) as silence:
        async for event in buffer.watch("", first):
            silence.reschedule(None)
            yield event
            silence.reschedule(loop.time() + silence_seconds)


async def _groups(buffer: BufferClient, replay: Replay) -> Mapping[str, pb.Group]:
    """A group that changes while pages are read may be on none of them: then it is asked for by name."""
    stream = replay.config.name
    groups = {group.group_id: group async for page in pages(buffer, stream, _PAGE) for group in page}
    missing = [group_id for group_id in replay.groups if group_id not in groups]
    for first in range(0, len(missing), _PAGE):
        found = await buffer.list_groups(stream, group_ids=missing[first : first + _PAGE])
        groups.update((group.group_id, group) for group in found.groups)
    return groups


async def _pass_over_forgotten(
    buffer: BufferClient, replay: Replay, groups: Mapping[str, pb.Group], end: int, silence_seconds: float
) -> None:
    """A step that was committed since the history was read may have made the ledger forget groups of old ones."""
    missing = [group_id for group_id, story in replay.groups.items() if not (story.is_forgotten or group_id in groups)]
    if not missing:
        return
    now = await buffer.position()
    async for event in _events(buffer, now, silence_seconds, replay, end + 1):
        if event.stream == replay.config.name and event.kind == "forgotten":
            replay.forget_since(event, missing)


_AT_ONCE = 256
_BYTES_AT_ONCE = 32 << 20

Sample = sample_pb2.SampleEnvelope


async def check_payloads(buffer: BufferClient, ledger: AuditedLedger) -> tuple[int, Sequence[Finding]]:
    """Returns how many payloads were read, and findings about the others."""
    groups = [group for group in ledger.groups.values() if group.state in (READY, CONSUMED)]
    num_read, findings = 0, []
    for some in _chunks([sample for group in groups for sample in group.samples]):
        found = await _check(buffer, ledger.replay.config.name, some)
        num_read += len(some) - len(found)
        findings += found
    return num_read, findings


async def _check(buffer: BufferClient, stream: str, samples: Sequence[Sample]) -> list[Finding]:
    """All in one call; where that fails, one by one, so that each that is damaged is named."""
    try:
        fetched = await buffer.fetch_stored(stream, [sample.sample_id for sample in samples])
        for expected, stored in zip(samples, fetched, strict=True):
            check_payload(expected.sample_id, expected.digest, len(stored.payload), stored.payload)
            for column in stored.envelope.out_of_line:
                await buffer.fetch_column(column)  # raises DataLoss for other bytes
    except (Unavailable, DeadlineExceeded):
        raise
    except HeadraceError as error:
        if len(samples) > 1:
            return [found for each in samples for found in await _check(buffer, stream, [each])]
        sample = samples[0]
        if await _has_moved(buffer, stream, sample):
            return []
        return [Finding("payload", f"of sample {sample.sample_id} of group {sample.group_id}: {error.message}")]
    return []


async def _has_moved(buffer: BufferClient, stream: str, sample: Sample) -> bool:
    """True when its group was committed, dropped or expired meanwhile."""
    found = await buffer.list_groups(stream, group_ids=[sample.group_id])
    return any(group.state not in (READY, CONSUMED) for group in found.groups)


def _chunks(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    some: list[Sample] = []
    num_bytes = 0
    for sample in samples:
        if some and (len(some) == _AT_ONCE or num_bytes + sample.payload_bytes > _BYTES_AT_ONCE):
            yield some
            some, num_bytes = [], 0
        some.append(sample)
        num_bytes += sample.payload_bytes
    if some:
        yield some


TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Audit:
    """A verdict and the amounts it was made from."""

    verdict: AuditVerdict
    num_events: int
    num_steps: int
    num_samples: int
    num_payloads: int | None
    """None: they were not read."""


async def audit_ledger(
    address: str, stream: str, record_file: Path, timeout_seconds: float = TIMEOUT_SECONDS, *, deep: bool = False
) -> Audit:
    """The audit of the buffers at these addresses. The record is read before the ledgers and after them."""
    ledgers: list[AuditedLedger] = []
    found: list[Finding] = []
    num_payloads = 0
    before = len(read_record(record_file).lines) if record_file.is_file() else 0
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
