"""Writes failed samples with their text to the sample log: no step trains them, so the trainer does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from headrace.job.schema.run import TrackingSection
from headrace.rpc.log import log
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample, Status


class FailedSamples:
    """Appends to the run's sample log, off the loop, one group at a time."""

    def __init__(self, samples: SampleLog, max_bytes: int) -> None:
        self._log = samples
        self._max_bytes = max_bytes
        self._file: Path | None = None
        self._writing = asyncio.Lock()

    @classmethod
    def of(cls, config: TrackingSection, folder: Path | None, service: int | None = None) -> FailedSamples | None:
        """Returns None without a folder, or when the job wants none written. `service`: one of several that write."""
        max_bytes = config.sample_log_bytes
        return cls(SampleLog(folder, service), max_bytes) if folder and max_bytes else None

    async def write(self, samples: Sequence[Sample]) -> None:
        """Writes those of a group that failed."""
        failed = [Answer.of(sample) for sample in samples if sample.status is Status.FAILED]
        if failed:
            async with self._writing:
                await asyncio.to_thread(self._append, failed)

    def _append(self, failed: Sequence[Answer]) -> None:
        try:
            file = self._file or self._log.new_failed_file()
            self._file = self._log.write_failed(file, failed, self._max_bytes)
        except OSError as error:  # what people read later is no reason to fail a group
            self._file = None
            log.warning("failed_samples_not_written", samples=len(failed), error=str(error))
