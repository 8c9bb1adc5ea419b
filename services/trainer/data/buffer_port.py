"""The buffer as the trainer needs it: of the ledger, or of recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2


class TrainerBuffer(Protocol):
    """`BufferClient` says what each method does."""

    async def rewind(self, stream: str, step: int, *, request_id: str | None = None) -> pb.RewindResponse: ...

    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse: ...

    async def fetch_samples(
        self, stream: str, sample_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> list[sample_pb2.Sample]: ...

    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int: ...

    async def commit(self, stream: str, epoch: int, step: int) -> int: ...

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int: ...

    async def stats(self, stream: str) -> pb.StreamStats: ...

    async def close(self) -> None: ...
