"""The loop's `TrainerLedger`: one stream of the buffer."""

from __future__ import annotations

from headrace.api.trainer.v1 import trainer_pb2 as pb
from services.trainer.data.buffer import StepRecorder, TrainerBuffer
from services.trainer.failure_budget import AllRewards, FailureBudget, Scorers, scored_by
from services.trainer.plan.batch import Batch
from services.trainer.serving.console import TrainerConsole

_WAIT_SECONDS = 2.0


class StreamLedger:
    """The buffer's stream that is trained on; waiting for a batch shows on the console."""

    def __init__(
        self,
        buffer: TrainerBuffer,
        stream: str,
        console: TrainerConsole,
        failure_budget: FailureBudget,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._buffer = buffer
        self._stream = stream
        self._console = console
        self._failure_budget = failure_budget
        self._recorder = recorder
        self._rewards = AllRewards()
        self._scorers = Scorers()

    async def rewind(self, step: int) -> int:
        return (await self._buffer.rewind(self._stream, step)).epoch

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        """Waits some seconds; None when the batch is not full yet, or the failure_budget ends the run.

        The console shows how many groups are ready.
        """
        with self._console.phase(pb.PHASE_WAITING):
            reply = await self._buffer.try_lease_batch(self._stream, epoch, step, wait_seconds=_WAIT_SECONDS)
        self._console.groups_ready(reply.groups_ready)
        stats = await self._buffer.stats(self._stream)
        if verdict := self._failure_budget.verdict(stats):
            self._console.give_up(verdict)
            return None
        if not reply.ready:
            return None
        if self._recorder is not None:
            await self._recorder.keep(step, reply)
        self._console.produced(self._rewards.since(stats) | scored_by(reply))
        if swap := self._scorers.swap(reply):
            self._console.mark(swap)
        return Batch.of(reply)

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        reply = await self._buffer.try_lease_batch(self._stream, epoch, step)
        return Batch.of(reply) if reply.ready else None

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        await self._buffer.consume(self._stream, epoch, step, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self._buffer.commit(self._stream, epoch, step)

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        await self._buffer.set_policy_version(self._stream, epoch, policy_version)
