"""TrainerService: proto to console and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.errors import Unavailable
from headrace.wire.checks import require_counter, require_id, require_path
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.export_folder import ExportFolders
from services.trainer.serving.once import Once
from services.trainer.serving.report import RunReport
from services.trainer.serving.requests import Steered
from services.trainer.state import TrainState

Context = Any


_KEPT_RESULTS = 256


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers in the middle of a step; what must not happen then waits for the step's end."""

    def __init__(self, console: TrainerConsole, report: RunReport, exports: ExportFolders) -> None:
        self._console = console
        self._report = report
        self._exports = exports
        self._saved: Once[pb.SaveCheckpointResponse] = Once(_KEPT_RESULTS)
        self._exported: Once[pb.ExportModelResponse] = Once(_KEPT_RESULTS)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return self._console.status

    async def WatchProgress(
        self, request: pb.WatchProgressRequest, context: Context
    ) -> AsyncIterator[pb.WatchProgressResponse]:
        from_step = require_counter(request.from_step, "from_step")
        async for row in self._report.watch(from_step):
            time = Timestamp()
            time.FromNanoseconds(int(row.time * 1e9))
            yield pb.WatchProgressResponse(step=row.step, time=time, metrics=dict(row.metrics), warnings=row.warnings)
        if self._console.goes_on:
            raise Unavailable(
                f"the trainer left the run after step {self._console.status.step}, to go on with it later: watch again"
            )

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        self._console.pause()
        return pb.PauseResponse(step=self._console.status.step)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        self._console.resume()
        return pb.ResumeResponse()

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        name = require_id(request.request_id, "request_id")
        return await self._saved.get(name, self._save_now)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Context) -> pb.ExportModelResponse:
        path = require_path(request.path, "path")
        folder = await asyncio.to_thread(self._exports.locate, path)
        if not await asyncio.to_thread(folder.exists):
            self._exported.discard(str(folder))
        return await self._exported.get(str(folder), lambda: self._export_now(folder))

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

    async def _export_now(self, folder: Path) -> pb.ExportModelResponse:
        await asyncio.to_thread(self._exports.require_new, folder)
        state = await self._console.ask(lambda ranks, _: ranks.export_to(folder))
        return pb.ExportModelResponse(path=str(folder), step=state.step)
