"""On-policy distillation's teacher: an SGLang server that gives its log-prob of each token of a response.

The log-probs travel with the sample, as the column teacher_log_probs. A sample that the teacher cannot score is FAILED.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from headrace.errors import HeadraceError
from headrace.job.schema.training import DistillationSection
from headrace.rpc.log import log
from headrace.rpc.retry import retry_until
from headrace.trajectory import Failure, Sample, Status
from services.rollout.engine.client import EngineClient

COLUMN = "teacher_log_probs"
_PATIENCE_SECONDS = 120.0


class Teacher:
    """`call_seconds` limits one sample's scoring, `patience_seconds` the wait for an absent server."""

    def __init__(self, url: str, *, call_seconds: float, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._client = EngineClient(url.rstrip("/"))
        self._call_seconds = call_seconds
        self._patience_seconds = patience_seconds

    @classmethod
    def of(cls, config: DistillationSection, *, call_seconds: float) -> Teacher | None:
        """Returns None when the job has no teacher that is served."""
        return None if config.opd_teacher_url is None else cls(config.opd_teacher_url, call_seconds=call_seconds)

    async def close(self) -> None:
        await self._client.close()

    async def mark(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples with their column; those that failed before stay as they are."""
        return await asyncio.gather(*(self._marked(sample) for sample in samples))

    async def _marked(self, sample: Sample) -> Sample:
        if sample.status is Status.FAILED:
            return sample
        try:
            return replace(sample, columns={**sample.columns, COLUMN: await self._log_probs(sample)})
        except HeadraceError as error:
            log.warning("teacher_failed", sample_id=sample.sample_id, reason=error.reason, error=error.message)
            return replace(sample, status=Status.FAILED, failure=Failure(f"TEACHER_{error.reason}", error.message))

    async def _log_probs(self, sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if not sample.response_length:
            return np.zeros(0, dtype=np.float32)
        found = await self._scored(sample.tokens.tolist())
        # Nothing predicts the first token of a response without a prompt, and nothing trains it.
        padded = [0.0, *found]
        return np.asarray(padded[len(padded) - sample.response_length :], dtype=np.float32)

    async def _scored(self, tokens: Sequence[int]) -> list[float]:
        """Raises errors that waiting cannot help at once, and Unavailable when waiting did not."""
        score = partial(self._client.score, tokens, cache_key="teacher", seconds=self._call_seconds)
        return await retry_until(time.monotonic() + self._patience_seconds, lambda _: score())
