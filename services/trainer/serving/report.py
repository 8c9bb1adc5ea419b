"""Writes a run's records: metrics.jsonl, its pictures, trackers, a live stream for watchers.

A disk that refuses metrics.jsonl ends no training: rows stay in memory, and all of them are written when it has space.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headrace.rpc.log import log
from headrace.whole_file import replacing
from services.trainer.serving.curves import draw_curves
from services.trainer.serving.evaluation_curves import draw_evaluations
from services.trainer.serving.row import MetricsRow, Packer
from services.trainer.serving.timeline import draw_timeline
from services.trainer.serving.trackers import OpenTrackers, Tracker

_REDRAW_SECONDS = 30.0


class RunReport:
    """Appends rows. `resume` first: a run that starts again keeps the rows up to its checkpoint."""

    def __init__(self, folder: Path, open_trackers: OpenTrackers = lambda step: ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / "metrics.jsonl"
        self._open_trackers = open_trackers
        self._trackers: Sequence[Tracker] = ()
        self.rows: list[MetricsRow] = []
        self._packer = Packer()
        self._said = False
        self._is_behind = False
        """metrics.jsonl lacks more than the newest of `rows`, or has others."""
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="curves")
        self._pictures: Sequence[Future[None]] = ()
        self._drawn = time.monotonic()
        self._changed = asyncio.Event()
        self._closed = False

    def resume(self, step: int) -> None:
        """Keeps the rows that an earlier start wrote up to `step`, and lets the later ones go."""
        self.rows = [row for row in _read(self._path, self._packer) if row.step <= step]
        self._is_behind = True
        self._write()
        self._trackers = self._open_trackers(step)

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        warnings: Sequence[str] = (),
        *,
        untracked: Collection[str] = (),
    ) -> None:
        """Adds a row to metrics.jsonl, the live stream and, but for the `untracked` ones, the trackers."""
        row = MetricsRow(step, time.time(), self._packer.packed(metrics), tuple(warnings))
        self.rows.append(row)
        self._write()
        for tracker in self._trackers:
            tracker.log(step, {name: value for name, value in metrics.items() if name not in untracked})
        if time.monotonic() - self._drawn > _REDRAW_SECONDS and all(picture.done() for picture in self._pictures):
            self._draw()
        self._wake()

    def close(self) -> None:
        """Draws the last pictures; watchers end."""
        self._closed = True
        if self._is_behind:
            self._write()
        if self.rows:
            self._draw()
        self._drawing.shutdown(wait=True)
        for tracker in self._trackers:
            tracker.close()
        self._wake()

    async def watch(self, from_step: int) -> AsyncIterator[MetricsRow]:
        """Every row from `from_step` on, then live, until the run is over."""
        sent = 0
        while True:
            changed = self._changed
            for row in self.rows[sent:]:
                if row.step >= from_step:
                    yield row
            sent = len(self.rows)
            if self._closed:
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _write(self) -> None:
        """Adds the newest row to the file, or replaces the file by all of them."""
        try:
            if self._is_behind:
                with replacing(self._path) as draft:
                    draft.write_text("".join(map(_line, self.rows)))
            else:
                with self._path.open("a") as file:
                    file.write(_line(self.rows[-1]))
        except OSError as error:
            if not self._said:
                log.warning("metrics_not_written", file=str(self._path), error=str(error), until="the disk takes them")
            self._is_behind = self._said = True
        else:
            self._is_behind = self._said = False

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        rows = list(self.rows)
        self._pictures = [
            self._drawing.submit(draw, rows, self._folder / f"{name}.png") for name, draw in _PICTURES.items()
        ]


_PICTURES = {"curves": draw_curves, "timeline": draw_timeline, "evaluations": draw_evaluations}


def _line(row: MetricsRow) -> str:
    warnings = {"warnings": row.warnings} if row.warnings else {}
    return json.dumps({"step": row.step, "time": row.time, **warnings, **row.metrics}) + "\n"


def _read(path: Path, packer: Packer) -> list[MetricsRow]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # the line that a kill tore
        rows.append(
            MetricsRow(
                fields.pop("step"),
                fields.pop("time"),
                warnings=fields.pop("warnings", ()),
                metrics=packer.packed(fields),
            )
        )
    return rows
