"""The loop's `TrainerLedger`: one stream of the buffer."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.api.trainer.v1 import trainer_pb2 as pb
from services.trainer.data.buffer import StepRecorder, TrainerBuffer
from services.trainer.failure_budget import AllRewards, FailureBudget, Scorers, scored_by
from services.trainer.plan.batch import Batch
from services.trainer.serving.console import TrainerConsole

_WAIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class StreamLedger:
    """The buffer's stream that is trained on; waiting for a batch shows on the console."""

    buffer: TrainerBuffer
    stream: str
    console: TrainerConsole
    failure_budget: FailureBudget
    recorder: StepRecorder | None = None
    _rewards: AllRewards = field(default_factory=AllRewards, init=False)
    _scorers: Scorers = field(default_factory=Scorers, init=False)

    async def rewind(self, step: int) -> int:
        return (await self.buffer.rewind(self.stream, step)).epoch

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        """Waits some seconds; None when the batch is not full yet, or the failure_budget ends the run.

        The console shows how many groups are ready.
        """
        with self.console.phase(pb.PHASE_WAITING):
            reply = await self.buffer.try_lease_batch(self.stream, epoch, step, wait_seconds=_WAIT_SECONDS)
        self.console.groups_ready(reply.groups_ready)
        stats = await self.buffer.stats(self.stream)
        if verdict := self.failure_budget.verdict(stats):
            self.console.give_up(verdict)
            return None
        if not reply.ready:
            return None
        if self.recorder is not None:
            await self.recorder.keep(step, reply)
        self.console.produced(self._rewards.since(stats) | scored_by(reply))
        if swap := self._scorers.swap(reply):
            self.console.mark(swap)
        return Batch.of(reply)

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        reply = await self.buffer.try_lease_batch(self.stream, epoch, step)
        return Batch.of(reply) if reply.ready else None

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        await self.buffer.consume(self.stream, epoch, step, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self.buffer.commit(self.stream, epoch, step)

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        await self.buffer.set_policy_version(self.stream, epoch, policy_version)
