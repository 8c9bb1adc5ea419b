"""TrainerService: proto to console and back, each key's work done once, exports into the folders that are allowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2_grpc
from headrace.errors import InvalidArgument, Unavailable
from headrace.limits import require_counter, require_id, require_path, shown
from services.trainer.serving.console import Savable, TrainerConsole
from services.trainer.serving.report import RunReport
from services.trainer.state import TrainState


class ExportFolders:
    """Folders below `root`, but not below those that the run keeps for itself. Its methods touch the disk."""

    def __init__(self, root: Path, reserved: Sequence[Path]) -> None:
        self._root = root
        self._reserved = reserved

    def locate(self, text: str) -> Path:
        """The folder that a client names, without symlinks. Raises InvalidArgument unless the operator allows it."""
        if not Path(text).is_absolute():
            raise _refused(f"path {shown(text)} is not absolute on the trainer's machine")
        with _disk_errors(shown(text)):
            folder, root = Path(text).resolve(), self._root.resolve()
            self._require_allowed(folder, root)
            nearest = next(each for each in (folder, *folder.parents) if each.exists())
            if not nearest.is_dir():
                raise _refused(f"{nearest} is not a folder: name a new folder")
            return folder

    def require_new(self, folder: Path) -> None:
        """Raises InvalidArgument unless it is absent or empty."""
        with _disk_errors(str(folder)):
            if folder.exists() and any(folder.iterdir()):
                raise _refused(f"{folder} is not empty: name a new folder")

    def _require_allowed(self, folder: Path, root: Path) -> None:
        if root not in folder.parents:
            raise _refused(f"{folder} is not below {root}: name a folder there, or start the run with --export-root")
        for taken in self._reserved:
            if folder.is_relative_to(taken.resolve()):
                raise _refused(f"{folder} is in {taken}, which the run keeps for itself: name another folder")


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for a loop of symlinks
        raise _refused(f"{path} cannot be read: {error}") from error


def _refused(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="path")


T = TypeVar("T")


async def once(tasks: dict[str, asyncio.Future[T]], key: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of the first `work` of the key that did not fail. A caller that goes away leaves it to the others."""
    task = tasks.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = tasks[key] = asyncio.ensure_future(work())
    return await asyncio.shield(task)


Context = Any


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers in the middle of a step; what must not happen then waits for the step's end."""

    def __init__(self, console: TrainerConsole, report: RunReport, exports: ExportFolders) -> None:
        self._console = console
        self._report = report
        self._exports = exports
        self._saved: dict[str, asyncio.Future[pb.SaveCheckpointResponse]] = {}
        self._exported: dict[str, asyncio.Future[pb.ExportModelResponse]] = {}

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
        return await once(self._saved, name, self._save_now)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Context) -> pb.ExportModelResponse:
        path = require_path(request.path, "path")
        folder = await asyncio.to_thread(self._exports.locate, path)
        key = str(folder)
        known = self._exported.get(key)
        is_removed = known is not None and known.done() and not await asyncio.to_thread(folder.exists)
        if is_removed and self._exported.get(key) is known:
            del self._exported[key]
        return await once(self._exported, key, lambda: self._export_now(folder))

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        self._console.stop()
        return pb.StopResponse(step=self._console.status.step)

    async def _save_now(self) -> pb.SaveCheckpointResponse:
        paths: list[Path] = []

        async def save(ranks: Savable, state: TrainState) -> None:
            await ranks.save(state)
            await ranks.flush()
            paths.append(ranks.checkpoint_path(state.step))

        state = await self._console.ask(save)
        return pb.SaveCheckpointResponse(path=str(paths[0]), step=state.step)

    async def _export_now(self, folder: Path) -> pb.ExportModelResponse:
        await asyncio.to_thread(self._exports.require_new, folder)
        state = await self._console.ask(lambda ranks, _: ranks.export_to(folder))
        return pb.ExportModelResponse(path=str(folder), step=state.step)
