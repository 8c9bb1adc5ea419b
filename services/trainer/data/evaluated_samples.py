"""The texts of evaluated samples, written while the evaluation runs: `headrace samples --eval` shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headrace.api.sample.v1 import sample_pb2
from headrace.rpc.log import log
from headrace.sample_log import Answer, SampleLog
from headrace.trajectory import Sample

_AT_ONCE = 256


class EvaluatedSamples:
    """Writes into the run's sample log; `max_bytes` is the job's sample_log_bytes."""

    def __init__(self, samples: SampleLog, max_bytes: int) -> None:
        self._log = samples
        self._max_bytes = max_bytes

    def of_step(self, step: int) -> EvaluatedStep:
        """The samples of one evaluation, which replace those of an earlier one of the same step."""
        return EvaluatedStep(self._log, step, self._max_bytes)


class EvaluatedStep:
    """Holds at most 256 samples in memory."""

    def __init__(self, samples: SampleLog, step: int, max_bytes: int) -> None:
        self._log = samples
        self._step = step
        self._max_bytes = max_bytes
        self._answers: list[Answer] = []
        self._is_new = True

    async def add(self, samples: Iterable[sample_pb2.Sample]) -> None:
        """Writes them once there are enough."""
        self._answers += [Answer.of(Sample.unpack(one), self._step) for one in samples]
        if len(self._answers) >= _AT_ONCE:
            await self.close()

    async def close(self) -> None:
        """Writes what is left."""
        answers, self._answers = self._answers, []
        is_new, self._is_new = self._is_new, False
        try:
            await asyncio.to_thread(self._log.write_evaluated, self._step, answers, self._max_bytes, is_new=is_new)
        except OSError as error:  # what people read later is no reason to lose the result
            log.warning("evaluated_samples_not_written", step=self._step, error=str(error))
