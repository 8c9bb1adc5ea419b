"""The promises of TrainerService that can be tried while a run goes on: it is paused for a moment, and resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.conformance.checks import CALL_SECONDS, Check, ask, refused, require, require_serving
from headrace.rpc.client import stream

SERVICE = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name


@dataclass(frozen=True)
class TrainerSubject:
    channel: Any

    @property
    def stub(self) -> Any:
        return trainer_pb2_grpc.TrainerServiceStub(self.channel)

    async def status(self) -> pb.GetStatusResponse:
        status: pb.GetStatusResponse = await ask(self.stub.GetStatus, pb.GetStatusRequest())
        return status


async def serves(subject: TrainerSubject) -> None:
    """Its health is SERVING, under the name of the service."""
    await require_serving(subject.channel, SERVICE)


async def says_where_it_is(subject: TrainerSubject) -> None:
    """GetStatus names the run, its phase, its step and its size; a run that failed says why."""
    status = await subject.status()
    require(status.run, "the run has no name")
    require(status.phase != pb.PHASE_UNSPECIFIED, "there is no phase")
    require(status.world_size >= 1, f"the world size is {status.world_size}")
    require(status.step >= 0, f"the step is {status.step}")
    require(status.phase != pb.PHASE_FAILED or status.error, "it failed, and does not say why")


async def tells_of_each_step_once(subject: TrainerSubject) -> None:
    """WatchProgress tells of the steps from the one that is asked for, once each and in order, with finite times."""
    last = (await subject.status()).step
    if not last:
        return
    steps: list[int] = []
    async for reply in stream(subject.stub.WatchProgress, pb.WatchProgressRequest(), deadline_seconds=CALL_SECONDS):
        steps.append(reply.step)
        require(reply.metrics, f"step {reply.step} has no metrics")
        require(not any(math.isinf(value) for value in reply.metrics.values()), f"step {reply.step} has infinities")
        if reply.step >= last:
            break
    require(steps == sorted(set(steps)), f"the steps came as {steps}")


async def may_be_paused_and_resumed(subject: TrainerSubject) -> None:
    """Pause and Resume may be repeated, and say at which step."""
    if (await subject.status()).phase in (pb.PHASE_FINISHED, pb.PHASE_FAILED):
        return
    try:
        first, second = [await ask(subject.stub.Pause, pb.PauseRequest()) for _ in range(2)]
        require(second.step >= first.step, f"paused at step {first.step}, and then at {second.step}")
    finally:
        for _ in range(2):
            await ask(subject.stub.Resume, pb.ResumeRequest())


async def refuses_an_export_to_nowhere(subject: TrainerSubject) -> None:
    with refused("an empty path", "INVALID_ARGUMENT", "FAILED_PRECONDITION"):
        await ask(subject.stub.ExportModel, pb.ExportModelRequest())


CHECKS: Sequence[Check[TrainerSubject]] = (
    serves,
    says_where_it_is,
    tells_of_each_step_once,
    may_be_paused_and_resumed,
    refuses_an_export_to_nowhere,
)
