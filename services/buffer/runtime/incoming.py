"""Checks samples before the ledger takes them: they are whole, fit the model, and the disk has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from headrace.api.sample.v1.sample_pb2 import SampleEnvelope
from headrace.errors import ResourceExhausted
from headrace.trajectory import check_payload
from services.buffer.blocking import BlockingPool
from services.buffer.conversion.payload_check import check_samples
from services.buffer.ledger.chunks import cut
from services.buffer.ledger.commands.work import NewSample
from services.buffer.ledger.ledger import Ledger
from services.buffer.store.base import Store

_SMALL_BYTES = 8 << 10
"""Payloads up to here are checked on the event loop."""
_CHECKED_BYTES = 64 << 10
"""Bytes of payloads and envelopes that are checked before other work runs."""


class Incoming:
    """Checks samples, and that `min_free_disk_bytes` of the store's disk stay free."""

    def __init__(self, ledger: Ledger, store: Store, min_free_disk_bytes: int) -> None:
        self._ledger = ledger
        self._store = store
        self._min_free_disk_bytes = min_free_disk_bytes
        self._hashers = BlockingPool("payload-hasher", 4)

    async def check(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        """Checks samples, each with its group's id. Large payloads are hashed in a thread, which also asks the disk.

        A thread costs more than it saves for small ones, as it shares the interpreter with the event loop; large ones
        on the loop would delay lease renewals. Raises what is wrong with a sample, and ResourceExhausted.
        """
        if not samples:
            return
        large = [one for one in samples if len(one[1].payload) > _SMALL_BYTES]
        await self._hashers.run(self._check_in_thread, large)
        small = samples if not large else [one for one in samples if len(one[1].payload) <= _SMALL_BYTES]
        for some in cut(small, lambda one: len(one[1].payload) + len(one[1].record.envelope), _CHECKED_BYTES):
            self._check(some)
            await asyncio.sleep(0)

    async def require_disk(self) -> None:
        """Raises ResourceExhausted when the disk is nearly full: consume and commit need the rest."""
        await self._hashers.run(self._require_disk)

    def _check_in_thread(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        self._require_disk()
        self._check(samples)

    def _check(self, samples: Sequence[tuple[str, NewSample]]) -> None:
        for record, payload in [(sample.record, sample.payload) for _, sample in samples]:
            check_payload(record.sample_id, record.digest, record.payload_bytes, payload)
        vocab_sizes = {group_id: self._ledger.vocab_size(group_id) for group_id in {one[0] for one in samples}}
        for vocab_size, some in groupby(samples, lambda one: vocab_sizes[one[0]]):
            check_samples(((SampleEnvelope.FromString(s.record.envelope), s.payload) for _, s in some), vocab_size)

    def _require_disk(self) -> None:
        free = self._store.free_bytes()
        if free is not None and free < self._min_free_disk_bytes:
            raise ResourceExhausted(
                f"the ledger's disk has {free} bytes left, min_free_disk_bytes is {self._min_free_disk_bytes}: free "
                "some, or save checkpoints, after which samples are deleted",
                reason="DISK_RESERVE",
                retry_after_seconds=5.0,
            )
