"""Checkpoints: folders step-00000012/ with a file of every rank and a manifest.

Written under a hidden name (`.draft`), a checkpoint takes its own in one rename, so what is visible is whole. All ranks
take copies of their share at once; writing them needs no collective, so with `async_save` it goes on while the next
step trains. Only when the new one is in place are older ones removed. A step that is saved again takes the place of its
older folder, which stays readable until the new one is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.config.job import Job
from headrace.errors import ConfigError, DataLoss, FailedPrecondition
from headrace.rpc.log import log
from services.trainer.checkpoint_reader import CheckpointReader, all_true
from services.trainer.checkpoint_writer import gather, write_pieces
from services.trainer.manifest import FileFacts, Manifest, sync, versions
from services.trainer.parallel import Layout
from services.trainer.piece import Piece, Place
from services.trainer.random_state import PREFIX as RANDOM
from services.trainer.retention import Retention
from services.trainer.state import TrainState

_PREFIX = "step-"
_DRAFT = ".draft"
_REPLACED = ".replaced"


class Saveable(Protocol):
    """One rank's share of what a checkpoint holds."""

    def pieces(self) -> Iterable[Piece]:
        """All ranks' pieces together are everything, each once."""

    def scalars(self) -> Mapping[str, Any]:
        """Numbers by part, equal on all ranks."""

    def restore(self, reader: CheckpointReader) -> None:
        """Takes this rank's share up again, bit for bit. Raises DataLoss that names what is missing."""


def checkpoint_folder(job: Job, run_dir: Path) -> Path:
    """Where this run's checkpoints go."""
    return job.checkpoint.save or run_dir / "checkpoints"


def step_name(step: int) -> str:
    """The folder of one checkpoint."""
    return f"{_PREFIX}{step:08d}"


class Checkpoints:
    """All ranks call the same methods in the same order; the folder is one that all of them see."""

    def __init__(self, job: Job, run_dir: Path, layout: Layout) -> None:
        self._folder = checkpoint_folder(job, run_dir)
        self._load = job.checkpoint.load
        self._in_background = job.checkpoint.async_save
        self._layout = layout
        self._retention = Retention.of(job.checkpoint, run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._safe: TrainState | None = None

    def save(self, policy: Saveable, *, step: int, policy_version: int, epoch: int) -> None:
        """Takes the copies. Returns when this rank's part is written (on rank 0: when the checkpoint survives a power
        loss), or with async_save at once: `take_safe` tells.
        """
        self.flush()
        draft = self._folder / _DRAFT
        dist.barrier()  # nobody writes any more
        if self._layout.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()  # the draft is there
        pieces = [_copied(piece) for piece in policy.pieces()]
        state, scalars = TrainState(step, policy_version, epoch), dict(policy.scalars())
        self._writing = self._thread.submit(self._write, draft, pieces, scalars, state)
        if not self._in_background:
            self.flush()

    def flush(self) -> None:
        """Waits for what is being written. Raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def take_safe(self) -> TrainState | None:
        """On rank 0: the newest state that became safe since the last time this was asked. Raises what went wrong."""
        if self._writing is not None and self._writing.done():
            self.flush()
        safe, self._safe = self._safe, None
        return safe

    def restore_latest(self, policy: Saveable) -> int:
        """The step of the newest undamaged checkpoint, now restored; 0 without one. Damaged ones are passed over."""
        found = self._newest_true(self._folder)
        if found is None and self._load is not None and self._load != self._folder:
            found = self._newest_true(self._load)
            if found is None:
                raise ConfigError(f"--load {self._load} holds no whole checkpoint: name a folder of step-… folders")
        if found is None:
            return 0
        reader = CheckpointReader(*found)
        policy.restore(reader)
        self._require_all_read(reader, found[0])
        return found[1].step

    def _write(self, draft: Path, pieces: list[Piece], scalars: dict[str, Any], state: TrainState) -> None:
        write_pieces(draft, self._layout.rank, pieces)
        if self._layout.rank == 0:
            gather(draft, self._layout.world_size, lambda files, places: self._manifest(state, scalars, files, places))
            self._put_in_place(draft, self._folder / step_name(state.step))
            self._safe = state
            self._prune()

    def _manifest(
        self, state: TrainState, scalars: dict[str, Any], files: dict[str, FileFacts], places: list[Place]
    ) -> Manifest:
        return Manifest(
            step=state.step,
            policy_version=state.policy_version,
            ledger_epoch=state.epoch,
            layout=self._layout.name,
            versions=versions(),
            scalars=scalars,
            files=files,
            places=places,
        )

    def _put_in_place(self, draft: Path, target: Path) -> None:
        replaced = target.with_name(target.name + _REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        draft.rename(target)
        sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        found = {manifest.step: folder for folder, manifest in whole_checkpoints(self._folder)}
        for step in self._retention.superfluous(found):
            shutil.rmtree(found[step])

    def _newest_true(self, folder: Path) -> tuple[Path, Manifest] | None:
        """The newest whose every byte is true. Raises DataLoss when there are some and all are damaged."""
        whole = whole_checkpoints(folder)
        self._require_agreement(whole)
        for path, manifest in whole:
            if all_true(path, manifest, self._layout):
                return path, manifest
            log.warning("checkpoint_passed_over", folder=str(path), error="its bytes are not those that were written")
        if damaged := sorted(path.name for path in folder.glob(f"{_PREFIX}*")):
            raise DataLoss(
                f"{folder} has no undamaged checkpoint left ({', '.join(damaged)} are damaged): take them away to "
                "start anew, or put a copy in their place"
            )
        return None

    def _require_all_read(self, reader: CheckpointReader, folder: Path) -> None:
        """Raises DataLoss that names tensors which no rank had a place for."""
        names = [name for name in reader.names if not name.startswith(RANDOM)]
        read = torch.tensor(
            [name in reader.read_names for name in names], dtype=torch.int64, device=self._layout.device
        )
        dist.all_reduce(read, op=dist.ReduceOp.MAX)
        extra = [name for name, was_read in zip(names, read.tolist(), strict=True) if not was_read]
        if extra:
            raise DataLoss(
                f"checkpoint {folder} holds {len(extra)} tensors that this job has no place for: "
                f"{', '.join(extra[:5])}: resume with the settings it was saved with, or take its weights alone with "
                "--initial-megatron-checkpoint"
            )

    def _require_agreement(self, found: list[tuple[Path, Manifest]]) -> None:
        mine = [len(found), found[0][1].step if found else -1]
        ends = torch.tensor([*mine, *(-value for value in mine)], dtype=torch.int64, device=self._layout.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, newest_step, fewest, oldest_step = ends.tolist()
        if (most, newest_step) != (-fewest, -oldest_step):
            raise FailedPrecondition(
                f"ranks see different checkpoints under {self._folder} (newest steps {-oldest_step} and "
                f"{newest_step}): use a folder that all machines share"
            )


def whole_checkpoints(folder: Path) -> list[tuple[Path, Manifest]]:
    """Newest first. A folder without a true manifest is logged and left out."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            found.append((path, Manifest.read(path)))
        except DataLoss as error:
            log.warning("checkpoint_passed_over", folder=str(path), error=error.message)
    return sorted(found, key=lambda entry: entry[1].step, reverse=True)


def newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest whole checkpoint in the folder, if there is one."""
    found = whole_checkpoints(folder)
    return found[0] if found else None


def _copied(piece: Piece) -> Piece:
    """On the CPU, in memory of its own: training goes on while it is written."""
    return replace(piece, values=piece.values.to("cpu", copy=True).contiguous())
