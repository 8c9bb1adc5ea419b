"""Writes a run's records: metrics.jsonl, its pictures, trackers, a live stream for watchers.

Memory holds no rows, but what the pictures show of them: a run may have a million steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace.metrics_row import MetricsRow
from services.trainer.serving.metrics_file import MetricsFile
from services.trainer.serving.pictures import curves, evaluation_curves, timeline
from services.trainer.serving.pictures.points import Point, Points
from services.trainer.serving.trackers import OpenTrackers, Tracker

_REDRAW_SECONDS = 30.0
_PICTURES: Mapping[str, Callable[[Sequence[Point], Path], None]] = {
    "curves": curves.draw_curves,
    "timeline": timeline.draw_timeline,
    "evaluations": evaluation_curves.draw_evaluations,
}
_OF_EVALUATIONS = evaluation_curves.DRAWN
_OF_STEPS = tuple({*curves.DRAWN, *timeline.DRAWN} - {*_OF_EVALUATIONS})
_EVALUATION = "eval"
"""What the names of an evaluation's metrics begin with."""


class RunReport:
    """Appends rows. `resume` first: a run that starts again keeps the rows up to its checkpoint."""

    def __init__(
        self, folder: Path, open_trackers: OpenTrackers = lambda step: (), changes: Sequence[str] = ()
    ) -> None:
        """`changes` are the options that this start changes, where an earlier one has trained: `lr 1e-06 -> 2e-06`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._open_trackers = open_trackers
        self._changes = changes
        self._marks: list[str] = []
        """What changed since the last step's row"""
        self._trackers: Sequence[Tracker] = ()
        self._steps = Points(_OF_STEPS)
        self._evaluations = Points(_OF_EVALUATIONS)
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="curves")
        self._pictures: Sequence[Future[None]] = ()
        self._drawn = time.monotonic()
        self._changed = asyncio.Event()
        self._closed = False

    def resume(self, step: int) -> None:
        """Keeps the rows that an earlier start wrote up to `step`, and lets the later ones go."""
        self._file.drop_after(step)
        is_restart = False
        for row in self._file.rows():
            self._show(row)
            is_restart = True
        if is_restart:
            self.mark(": ".join(filter(None, ["restart", ", ".join(self._changes)])))
        self._trackers = self._open_trackers(step)
        self._wake()

    def rows(self) -> Iterator[MetricsRow]:
        """Reads all rows from the file, one after the other."""
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
        is_step = not all(name.startswith(_EVALUATION) for name in metrics)
        marks = tuple(self._marks) if is_step else ()
        row = MetricsRow(step, time.time(), metrics, tuple(warnings), marks)
        if is_step:
            self._marks.clear()
        self._file.append(row)
        self._show(row)
        for tracker in self._trackers:
            tracker.log(step, {name: value for name, value in metrics.items() if name not in untracked})
        if time.monotonic() - self._drawn > _REDRAW_SECONDS and all(picture.done() for picture in self._pictures):
            self._draw()
        self._wake()

    def close(self) -> None:
        """Draws the last pictures; watchers end."""
        self._closed = True
        self._file.settle()
        self._draw()
        self._drawing.shutdown(wait=True)
        for tracker in self._trackers:
            tracker.close()
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

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _show(self, row: MetricsRow) -> None:
        """Adds the row to what the pictures show."""
        self._steps.add(row.step, row.metrics, row.time, row.marks)
        self._evaluations.add(row.step, row.metrics, row.time)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        points = [*self._steps.all(), *self._evaluations.all()]
        if points:
            self._pictures = [
                self._drawing.submit(draw, points, self._folder / f"{name}.png") for name, draw in _PICTURES.items()
            ]
