"""Stands in for engines where a run has none, and for the ranks where nothing is trained."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import FailedPrecondition
from services.trainer.data.buffer import TrainingRecord
from services.trainer.durable import retry_while_full
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.loop import Devices, Engines
from services.trainer.plan.batch import Batch, statistics
from services.trainer.state import NONE_STALE, EngineIds, StaleEngines, TrainState


class NoEngines:
    """Publishes to nobody, which takes no time."""

    async def publish(self, state: TrainState) -> dict[str, float]:
        return {}

    async def stale_engines(self, state: TrainState) -> StaleEngines:
        return NONE_STALE

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None: ...


_NO_MODEL = "this run only generates (--debug-rollout-only): it has no weights to save or export"


class UntrainedRanks:
    """`step` is where the ledger was left. A batch is committed as soon as it was consumed: no checkpoint needs it."""

    def __init__(self, step: int, run_dir: Path) -> None:
        self._step = step
        self._record = TrainingRecord(run_dir / "trained.jsonl")
        self._epoch = 0
        self._safe: TrainState | None = None
        self.devices: Devices = OwnDevices()
        self.engines: Engines = NoEngines()

    async def restore(self) -> int:
        return self._step

    async def claim(self, state: TrainState) -> None:
        self._epoch = state.epoch

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        """The batch's figures. Its samples are written down as those that the step was fed."""
        await retry_while_full(lambda: self._record.append(step, batch), self._record.path)
        self._safe = TrainState(step + 1, 0, self._epoch)
        return statistics(batch, step)

    async def prefetch(self, batch: Batch) -> None: ...

    async def publish(self, state: TrainState) -> dict[str, float]:
        return {}

    async def save(self, state: TrainState) -> None: ...

    async def flush(self) -> None: ...

    def take_safe(self) -> TrainState | None:
        safe, self._safe = self._safe, None
        return safe

    async def export(self) -> None: ...

    def checkpoint_path(self, step: int) -> Path:
        """Raises FailedPrecondition, for somebody who asks for a checkpoint."""
        raise FailedPrecondition(_NO_MODEL)

    async def export_to(self, path: Path) -> None:
        """Raises FailedPrecondition, for somebody who asks for an export."""
        raise FailedPrecondition(_NO_MODEL)
