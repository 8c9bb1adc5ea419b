"""TrainerService: proto to console and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.errors import InvalidArgument
from services.trainer.console import Steered, TrainerConsole
from services.trainer.report import Report
from services.trainer.state import TrainState

Context = Any


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers in the middle of a step; what must not happen then waits for the step's end."""

    def __init__(
        self,
        console: TrainerConsole,
        report: Report,
    ) -> None:
        self._console = console
        self._report = report
        self._saved: dict[str, pb.SaveCheckpointResponse] = {}

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return self._console.status

    async def WatchProgress(
        self, request: pb.WatchProgressRequest, context: Context
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        async for row in self._report.watch(request.from_step):
            time = Timestamp()
            time.FromNanoseconds(int(row.time * 1e9))
            yield pb.WatchProgressResponse(step=row.step, time=time, metrics=row.metrics)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        self._console.pause()
        return pb.PauseResponse(step=self._console.status.step)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        self._console.resume()
        return pb.ResumeResponse()

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        if not request.request_id:
            raise InvalidArgument("request_id is empty: choose one for each save", field="request_id")
        if request.request_id not in self._saved:
            self._saved[request.request_id] = await self._save_now()
        return self._saved[request.request_id]

    async def ExportModel(self, request: pb.ExportModelRequest, context: Context) -> pb.ExportModelResponse:
        path = Path(request.path)
        if not path.is_absolute():
            raise InvalidArgument(f"path {request.path!r} is not absolute on the trainer's machine", field="path")
        if await asyncio.to_thread(_holds_files, path):
            raise InvalidArgument(f"{path} is not empty: name a new folder", field="path")
        state = await self._console.ask(lambda ranks, _: ranks.export_to(path))
        return pb.ExportModelResponse(path=str(path), step=state.step)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        self._console.stop()
        return pb.StopResponse(step=self._console.status.step)

    async def _save_now(self) -> pb.SaveCheckpointResponse:
        paths: list[Path] = []

        async def save(ranks: Steered, state: TrainState) -> None:
            await ranks.save(state)
            await ranks.flush()
            paths.append(ranks.checkpoint_path(state.step))

        state = await self._console.ask(save)
        return pb.SaveCheckpointResponse(path=str(paths[0]), step=state.step)


def _holds_files(path: Path) -> bool:
    return path.exists() and any(path.iterdir())
