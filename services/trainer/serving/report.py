"""Writes a run's records: metrics.jsonl, its pictures, trackers, a stream for watchers.

Memory holds no rows, but what the pictures show of them: a run may have a million steps. Rows that the disk refuses
wait in memory and are written before later ones. One thread writes; any may read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.disk import atomic_write
from headrace.rpc.log import log
from headrace.run_folder import MetricsRow, RunFolder, is_evaluation, row_of, step_of
from headrace.sample_log import SampleLog
from services.trainer.durable import append_rows
from services.trainer.serving import pictures
from services.trainer.serving.pictures import Point, Points
from services.trainer.serving.trackers import OpenTrackers, Trackers

MOST_WAITING = 10_000
"""Rows that wait for the disk; beyond that the oldest are lost."""
_PART_BYTES = 256 << 10


class MetricsFile:
    """`drop_after` first: before it, and until the disk took it, nothing of an earlier start's rows is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._drop_after: int | None = None
        """Later steps' rows go before anything is written."""
        self._num_bytes = 0
        """The readable part: whole lines, of rows that stay."""
        self._said = False

    def drop_after(self, step: int) -> None:
        """Keeps the rows that an earlier start wrote up to `step`, and drops the later ones."""
        self._drop_after = step
        self._write()

    def append(self, row: MetricsRow) -> None:
        """Adds a row. It raises nothing: what the disk refuses is written later."""
        self._waiting.append(row.fields())
        self._write()

    def settle(self) -> None:
        if self._waiting or self._drop_after is not None:
            self._write()

    def rows(self) -> Iterator[MetricsRow]:
        offset, end = 0, self._num_bytes
        while offset < end:
            some, offset = self.read(offset)
            yield from some

    def read(self, offset: int, from_step: int = 0) -> tuple[list[MetricsRow], int]:
        """Returns some of the rows at `offset`, those before `from_step` left out, and the offset behind them.

        At the end of what is written the offset stays what it is.
        """
        if (left := self._num_bytes - offset) <= 0:
            return [], offset
        with self._path.open("rb") as file:
            file.seek(offset)
            lines = file.readlines(min(_PART_BYTES, left))
        wanted = (line for line in lines if from_step == 0 or (step_of(line) or 0) >= from_step)
        rows = (row_of(line) for line in wanted)
        return [row for row in rows if row is not None], offset + sum(map(len, lines))

    def _write(self) -> None:
        try:
            if self._drop_after is not None:
                self._drop(self._drop_after)
                self._drop_after = None
            append_rows(self._path, self._waiting, synced=False)
        except OSError as error:
            if not self._said:
                until = f"the disk takes them; the last {MOST_WAITING} are kept"
                log.warning("metrics_not_written", file=str(self._path), error=str(error), until=until)
            self._said = True
            return
        self._waiting.clear()
        self._said = False
        self._num_bytes = self._path.stat().st_size

    def _drop(self, step: int) -> None:
        """Replaces the file by one without the later steps' lines, if it has any."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if not any(_is_later(line, step) for line in file):
                return
            file.seek(0)
            with atomic_write(self._path) as draft, draft.open("wb") as shorter:
                shorter.writelines(line for line in file if not _is_later(line, step))


def _is_later(line: bytes, step: int) -> bool:
    found = step_of(line)
    return found is not None and found > step


_REDRAW_SECONDS = 30.0
_PICTURES: Mapping[str, Callable[[Sequence[Point], Path], None]] = {
    "curves": pictures.draw_curves,
    "timeline": pictures.draw_timeline,
    "evaluations": pictures.draw_evaluations,
}
_OF_EVALUATIONS = pictures.EVALUATIONS
_OF_STEPS = tuple({*pictures.CURVES, *pictures.TIMELINE} - {*_OF_EVALUATIONS})


class RunReport(Collector):
    """Appends rows. `resume` first: a run that starts again keeps the rows up to its checkpoint."""

    def __init__(
        self, folder: Path, open_trackers: OpenTrackers = lambda step: Trackers(), changes: Sequence[str] = ()
    ) -> None:
        """`changes` are the options that this start changes, where an earlier one has trained: `lr 1e-06 -> 2e-06`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._open_trackers = open_trackers
        self._changes = changes
        self._marks: list[str] = []
        """What changed since the last step's row"""
        self._trackers = Trackers()
        self._samples = SampleLog(RunFolder(folder).samples)
        self._newest: Mapping[str, float] = {}
        self._newest_step = 0
        self._maybe_trained: int | None = None
        """The step that was trained last"""
        self._steps = Points(_OF_STEPS)
        self._evaluations = Points(_OF_EVALUATIONS)
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="curves")
        self._pictures: Sequence[Future[None]] = ()
        self._drawn = time.monotonic()
        self._changed = asyncio.Event()
        self._closed = False

    def resume(self, step: int) -> None:
        self._file.drop_after(step)
        is_restart = False
        for row in self._file.rows():
            self._show(row)
            is_restart = True
        if is_restart:
            self.mark(": ".join(filter(None, ["restart", ", ".join(self._changes)])))
        self._trackers = self._open_trackers(step)
        self._wake()

    def collect(self) -> Iterator[Metric]:
        """The newest value of each metric, for the trainer's metrics page."""
        newest = GaugeMetricFamily("headrace_trainer_metric", "Newest value in metrics.jsonl.", labels=["name"])
        for name, value in self._newest.items():
            newest.add_metric([name], value)
        yield newest
        yield GaugeMetricFamily("headrace_trainer_step", "Steps trained.", self._newest_step)

    def rows(self) -> Iterator[MetricsRow]:
        return self._file.rows()

    def mark(self, text: str) -> None:
        """The next step's row, and the pictures from there on, say that this changed before it."""
        self._marks.append(text)

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        warnings: Sequence[str] = (),
        *,
        untracked: Collection[str] = (),
    ) -> None:
        """Adds a row to metrics.jsonl, the live stream and, but for the `untracked` ones, the trackers."""
        is_step = not is_evaluation(metrics)
        marks = tuple(self._marks) if is_step else ()
        row = MetricsRow(step, time.time(), metrics, tuple(warnings), marks)
        if is_step:
            self._marks.clear()
        self._file.append(row)
        self._show(row)
        self._trackers.log(step, {name: value for name, value in metrics.items() if name not in untracked})
        if is_step:
            self._log_rollouts()  # of the step before: the ranks have written its samples by now
            self._maybe_trained = step
        if time.monotonic() - self._drawn > _REDRAW_SECONDS and all(picture.done() for picture in self._pictures):
            self._draw()
        self._wake()

    def close(self) -> None:
        """Draws the last pictures; watchers end."""
        self._closed = True
        self._file.settle()
        self._draw()
        self._drawing.shutdown(wait=True)
        self._log_rollouts()
        self._trackers.close()
        self._wake()

    async def watch(self, from_step: int) -> AsyncIterator[MetricsRow]:
        """Every row from `from_step` on, then live, until the run is over."""
        offset = 0
        while True:
            changed, is_last = self._changed, self._closed
            rows, end = await asyncio.to_thread(self._file.read, offset, from_step)
            for row in rows:
                yield row
            if end > offset:
                offset = end
            elif is_last:
                return
            else:
                await changed.wait()

    def _log_rollouts(self) -> None:
        if self._maybe_trained is not None:
            self._trackers.log_rollouts(self._maybe_trained, self._samples)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _show(self, row: MetricsRow) -> None:
        self._newest, self._newest_step = {**self._newest, **row.metrics}, max(row.step, self._newest_step)
        self._steps.add(row.step, row.metrics, row.time, row.marks)
        self._evaluations.add(row.step, row.metrics, row.time)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        points = [*self._steps.all(), *self._evaluations.all()]
        if points:
            self._pictures = [
                self._drawing.submit(draw, points, self._folder / f"{name}.png") for name, draw in _PICTURES.items()
            ]
