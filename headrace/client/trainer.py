"""The trainer's client: reads the loop's state and progress, and controls it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from google.protobuf.message import Message

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.rpc.client import DEFAULT_DEADLINE_SECONDS, Closing, Reply, call, connect, resumed, stream

# A save or an export waits for the end of the current step and then writes all the weights.
_LONG_DEADLINE_SECONDS = 3600.0


class TrainerClient(Closing):
    """Speaks to rank 0 of one trainer. Close it, or use it as a context."""

    def __init__(self, address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> None:
        self._channel = connect(address)
        self._peer = f"the trainer at {address}"
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        self._deadline_seconds = deadline_seconds

    async def close(self) -> None:
        await self._channel.close(None)

    async def status(self) -> pb.GetStatusResponse:
        """State of the training loop."""
        return await self._call(self._stub.GetStatus, pb.GetStatusRequest())

    async def watch_progress(self, from_step: int = 0) -> AsyncIterator[pb.WatchProgressResponse]:
        """Yields every finished step from `from_step` on until the run ends, also over restarts of the trainer.

        Raises Unavailable when the trainer has been away for five minutes.
        """
        step, rows, again = from_step, 0, 0

        async def ask(*, deadline_seconds: float | None) -> AsyncIterator[pb.WatchProgressResponse]:
            nonlocal again
            again = rows
            request = pb.WatchProgressRequest(from_step=step)
            replies = stream(self._stub.WatchProgress, request, deadline_seconds=deadline_seconds, peer=self._peer)
            async for row in replies:
                if row.step == step and again:
                    again -= 1  # it was there before the trainer ended
                else:
                    yield row

        async for row in resumed(self._channel, ask):
            step, rows = row.step, 1 + (rows if row.step == step else 0)
            yield row

    async def pause(self) -> int:
        """Pauses the loop; returns the step that it stops before."""
        reply = await self._call(self._stub.Pause, pb.PauseRequest())
        return reply.step

    async def resume(self) -> None:
        await self._call(self._stub.Resume, pb.ResumeRequest())

    async def save_checkpoint(self, *, request_id: str | None = None) -> pb.SaveCheckpointResponse:
        """Returns when the checkpoint is durable."""
        request = pb.SaveCheckpointRequest(request_id=request_id or uuid.uuid4().hex)
        return await self._call(self._stub.SaveCheckpoint, request, _LONG_DEADLINE_SECONDS)

    async def export_model(self, path: Path) -> pb.ExportModelResponse:
        """Writes a Hugging Face folder at an absolute path of the trainer's machine."""
        request = pb.ExportModelRequest(path=str(path))
        return await self._call(self._stub.ExportModel, request, _LONG_DEADLINE_SECONDS)

    async def stop(self) -> int:
        """Asks the run to save and end; returns the step that it stops before."""
        reply = await self._call(self._stub.Stop, pb.StopRequest())
        return reply.step

    async def _call(
        self, method: Callable[..., Awaitable[Reply]], request: Message, seconds: float | None = None
    ) -> Reply:
        return await call(method, request, deadline_seconds=seconds or self._deadline_seconds, peer=self._peer)
