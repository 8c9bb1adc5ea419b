"""The trainer's buffer where its rollout steps lie in files: nothing is waited for, and nothing is told to anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import NotFound
from headrace.recorded_steps import RecordedStep, RecordedSteps

_EPOCH = 1
_STEPS_AT_ONCE = 2


class RecordedBuffer:
    """Serves `TrainerBuffer` from recorded steps. Each rank reads the files itself."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded
        self._read: dict[int, RecordedStep] = {}
        self._lock = asyncio.Lock()

    async def rewind(self, stream: str, step: int, *, request_id: str | None = None) -> pb.RewindResponse:
        """Every step is there as often as it is asked for."""
        return pb.RewindResponse(epoch=_EPOCH)

    async def try_lease_batch(
        self, stream: str, epoch: int, step: int, *, wait_seconds: float = 0.0
    ) -> pb.LeaseBatchResponse:
        """The step's batch. Raises NotFound for a step that was not recorded, DataLoss for a damaged file."""
        return (await self._step(step)).batch

    async def fetch_samples(
        self, stream: str, sample_ids: Sequence[str], *, deadline_seconds: float | None = None
    ) -> list[sample_pb2.Sample]:
        """Samples of one step. Raises NotFound when no step has them."""
        if not sample_ids:
            return []
        recorded = await self._step(await self._step_of(sample_ids[0]))
        found = {sample.envelope.sample_id: sample for sample in recorded.samples}
        if missing := [sample_id for sample_id in sample_ids if sample_id not in found]:
            raise NotFound(f"no sample {missing[0]} beside {sample_ids[0]} in {self._recorded.pattern}")
        return [found[sample_id] for sample_id in sample_ids]

    async def consume(self, stream: str, epoch: int, step: int, digest: bytes) -> int:
        """Nobody counts."""
        return step + 1

    async def commit(self, stream: str, epoch: int, step: int) -> int:
        """Files stay."""
        return step

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int:
        """Nobody generates."""
        return policy_version

    async def stats(self, stream: str) -> pb.StreamStats:
        """Nothing is produced."""
        return pb.StreamStats(stream=stream)

    async def close(self) -> None:
        """Nothing is open."""

    async def _step_of(self, sample_id: str) -> int:
        """Ranks other than the first are not told which step they train: it is most often the next."""
        for step, recorded in self._read.items():
            if any(sample.envelope.sample_id == sample_id for sample in recorded.samples):
                return step
        newest = max(self._read, default=-1)
        for step in sorted(self._recorded.steps(), key=lambda step: (step <= newest, step)):
            if sample_id in await asyncio.to_thread(self._recorded.read_ids, step):
                return step
        raise NotFound(f"no sample {sample_id} in {self._recorded.pattern}")

    async def _step(self, step: int) -> RecordedStep:
        """Holds the two steps that were read last: the one that is trained and the next."""
        async with self._lock:
            if step not in self._read:
                self._read[step] = await asyncio.to_thread(self._recorded.read, step)
                if len(self._read) > _STEPS_AT_ONCE:
                    del self._read[next(iter(self._read))]
            return self._read[step]
