"""Keeps what the trainer is given for each rollout step, before the step is trained."""

from __future__ import annotations

import asyncio

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import DiskFull
from headrace.recorded_steps import RecordedStep, RecordedSteps, sample_ids_of
from services.trainer.data.buffer_port import TrainerBuffer

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
