"""The buffer as the trainer needs it: the service, or recorded steps; and the trainer's own record of each step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import DiskFull, NotFound
from headrace.recorded_steps import RecordedStep, RecordedSteps, sample_ids_of
from services.trainer.durable import append_rows
from services.trainer.plan.batch import Batch


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


class TrainingRecord:
    """Appends to trained.jsonl: {"step", "digest", "sample_ids"}."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, batch: Batch) -> None:
        """Durable when it returns."""
        line = {"step": step, "digest": batch.digest.hex(), "sample_ids": [s.sample_id for s in batch.samples]}
        append_rows(self.path, [line])


_EPOCH = 1
_STEPS_AT_ONCE = 2


class RecordedBuffer:
    """Serves `TrainerBuffer` from recorded steps. Each rank reads the files itself."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded
        self._read: dict[int, RecordedStep] = {}
        self._lock = asyncio.Lock()

    async def rewind(self, stream: str, step: int, *, request_id: str | None = None) -> pb.RewindResponse:
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
        return step + 1

    async def commit(self, stream: str, epoch: int, step: int) -> int:
        return step

    async def set_policy_version(self, stream: str, epoch: int, policy_version: int) -> int:
        return policy_version

    async def stats(self, stream: str) -> pb.StreamStats:
        return pb.StreamStats(stream=stream)

    async def close(self) -> None: ...

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


_SECONDS = 600.0


class StepRecorder:
    """`buffer` is asked for all samples of a batch, those of other ranks among them."""

    def __init__(self, recorded: RecordedSteps, buffer: TrainerBuffer, stream: str) -> None:
        self._recorded = recorded
        self._buffer = buffer
        self._stream = stream
        self._newest: tuple[int, bytes] | None = None

    async def keep(self, step: int, batch: buffer_pb2.LeaseBatchResponse) -> None:
        """Returns when the step's file is durable. Raises DiskFull when it cannot be written."""
        if self._newest == (step, batch.digest):
            return
        samples = await self._buffer.fetch_samples(self._stream, sample_ids_of(batch), deadline_seconds=_SECONDS)
        try:
            await asyncio.to_thread(self._recorded.write, step, RecordedStep(batch, samples))
        except OSError as error:
            raise DiskFull(
                f"rollout step {step} cannot be kept at {self._recorded.path_of(step)}: {error.strerror}: make room, "
                "or leave --save-debug-rollout-data out"
            ) from error
        self._newest = step, batch.digest
