"""Every payload that the ledger still has, read and compared with the digest that the ledger shows for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import DeadlineExceeded, HeadraceError, Unavailable
from headrace.ledger_tools.audit.events import CONSUMED, READY
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.ledger import AuditedLedger
from headrace.trajectory import check_payload

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
