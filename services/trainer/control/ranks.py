"""The loop's `Ranks`: what the training loop asks of all ranks, put into orders and publications."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.models.folders import is_whole
from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control.rank_group import RankGroup
from services.trainer.data.buffer import TrainingRecord
from services.trainer.data.samples import SetAside
from services.trainer.durable import outlast
from services.trainer.gpu_sharing import Devices
from services.trainer.plan.batch import Batch, statistics
from services.trainer.serving.console import TrainerConsole
from services.trainer.standalone import Publications
from services.trainer.state import EngineIds, Lacking, TrainState


class TrainerRanks:
    """All trainer processes, as one.

    `restored_step` is where the latest checkpoint left off, 0 without one; `save_hf` is the Hugging Face folder that
    the job wants after `num_steps`.
    """

    def __init__(
        self,
        group: RankGroup,
        publisher: Publications,
        console: TrainerConsole,
        run_dir: Path,
        checkpoints: Checkpoints,
        *,
        restored_step: int,
        num_steps: int,
        save_hf: Path | None,
        devices: Devices,
    ) -> None:
        self._group = group
        self._publisher = publisher
        self._console = console
        self._record = TrainingRecord(run_dir / "trained.jsonl")
        self._set_aside = SetAside(run_dir / "set_aside.jsonl")
        self._checkpoints = checkpoints
        self._restored_step = restored_step
        self._num_steps = num_steps
        self._save_hf = save_hf
        self._devices = devices

    async def restore(self) -> int:
        """The ranks restored themselves while they were built; this is the step they came to."""
        return self._restored_step

    async def claim(self, state: TrainState) -> None:
        """Keeps older trainers from putting checkpoints into the folder from here on."""
        self._devices.claim(state.epoch)
        await asyncio.to_thread(self._checkpoints.claim, state.epoch)

    @property
    def shares_devices(self) -> bool:
        """The job says --colocate."""
        return self._devices.is_shared

    async def take_devices(self) -> None:
        """Engines give their memory up, and that of the ranks is on the devices."""
        await self._devices.take()

    async def give_devices(self) -> None:
        """The other way round."""
        await self._devices.give()

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        """One rollout step's optimizer steps."""
        with self._console.phase(pb.PHASE_TRAINING):
            trained = await self._group.train(step, self._set_aside.applied(batch).samples)
        await outlast(lambda: self._set_aside.append(step, trained.set_aside), self._set_aside.path)
        await outlast(lambda: self._record.append(step, batch), self._record.path)
        figures = statistics(self._set_aside.applied(batch), step)
        if trained.is_logged:
            self._console.keep_from_trackers(figures)
        return trained.metrics | figures

    async def prefetch(self, batch: Batch) -> None:
        """Every rank begins to fetch its samples of the next step."""
        await self._group.prefetch(self._set_aside.applied(batch).samples)

    async def publish(self, state: TrainState) -> dict[str, float]:
        """The current weights to all engines."""
        with self._console.phase(pb.PHASE_PUBLISHING):
            return await self._publisher.publish(state)

    async def lacking(self, state: TrainState) -> Lacking:
        """Engines that do not serve its policy version."""
        return await self._publisher.lacking(state)

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None:
        """Engines that started again get the served weights, while the others go on."""
        await self._publisher.rejoin(state, engine_ids)

    async def flush(self) -> None:
        """Waits until the checkpoint that was taken last is safe."""
        with self._console.phase(pb.PHASE_SAVING):
            await asyncio.to_thread(self._checkpoints.flush)

    def take_safe(self) -> TrainState | None:
        """The newest state whose checkpoint became safe since this was asked last."""
        return self._checkpoints.take_safe()

    async def save(self, state: TrainState) -> None:
        """Returns when the checkpoint is safe, or with async_save when its copies are taken."""
        with self._console.phase(pb.PHASE_SAVING):
            await self._devices.take()  # a person may ask for it in the engines' turn
            await self._group.save(state)

    def checkpoint_path(self, step: int) -> Path:
        """The folder into which `save` puts the checkpoint of a step."""
        return self._checkpoints.path_of(step)

    async def export(self) -> None:
        """Writes save_hf, if the job has it and a trainer that died at the very end has not written all of it yet."""
        if self._console.leaving:
            return
        folder = self._save_hf
        was_finished = self._restored_step == self._num_steps
        if folder is None or (was_finished and await asyncio.to_thread(is_whole, folder)):
            return
        await self.export_to(folder)

    async def export_to(self, path: Path) -> None:
        """Writes the current weights as a Hugging Face folder."""
        with self._console.phase(pb.PHASE_SAVING):
            await self._devices.take()
            await self._group.export(path)
