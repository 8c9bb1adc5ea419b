"""The texts of the samples that a step trained, written beside the training: no optimizer step waits for a disk.

A step's file is there before a checkpoint covers the step, and so before the ledger deletes the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.rpc.log import log
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample
from services.trainer.data.reading import FetchSamples, Read


class SamplesRead:
    """A `FetchSamples` that remembers the text of what it fetched, not the tokens."""

    def __init__(self, fetch: FetchSamples, step: int) -> None:
        self._fetch = fetch
        self._step = step
        self._answers: dict[str, Answer] = {}

    def __call__(self, sample_ids: Sequence[str]) -> Sequence[Read]:
        read = self._fetch(sample_ids)
        self._answers |= {one.sample_id: Answer.of(one, self._step) for one in read if isinstance(one, Sample)}
        return read

    def of(self, trained_ids: Sequence[str]) -> list[Answer]:
        """Returns the samples that this rank trained: a user's function may have been given more."""
        return [self._answers[sample_id] for sample_id in trained_ids]


class TrainedSamples:
    """Writes one data rank's share of each step, one step at a time."""

    def __init__(self, samples: SampleLog, rank: int, max_bytes: int) -> None:
        self._log = samples
        self._rank = rank
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        """Writes in the background, after the step before is written."""
        self.wait()
        self._writing = self._thread.submit(self._write, step, answers)

    def wait(self) -> None:
        """Returns once everything is written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, step: int, answers: Sequence[Answer]) -> None:
        try:
            written = self._log.write_step(step, self._rank, answers, self._max_bytes)
        except OSError as error:  # what people read later is no reason to end a training
            log.warning("samples_not_written", step=step, error=str(error))
            return
        if written < len(answers):
            log.warning("samples_cut", step=step, written=written, of=len(answers), sample_log_bytes=self._max_bytes)
