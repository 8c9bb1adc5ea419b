"""Checkpoints: folders step-00000012/ with a file or more of every rank and a manifest.

A checkpoint is written under a hidden name (`.draft`) and takes its own in one rename, so what is visible is whole.
Only then older ones are removed, all but two. A step that is saved again takes the place of its older folder, which
stays readable until the new one is there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.config.job import Job
from headrace.errors import ConfigError, DataLoss, FailedPrecondition
from headrace.rpc.log import log
from services.trainer.manifest import Manifest, sync_folder
from services.trainer.parallel import Layout

KEPT = 2
_PREFIX = "step-"
_DRAFT = ".draft"
_REPLACED = ".replaced"


class Saveable(Protocol):
    """One rank's part of what a checkpoint holds."""

    def save(self, folder: Path) -> None:
        """Adds this rank's files to the folder, under names of its own."""

    def restore(self, folder: Path) -> None:
        """Takes its files up again, bit for bit."""


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
        self._layout = layout

    def save(self, policy: Saveable, *, step: int, policy_version: int, epoch: int) -> None:
        """Returns on rank 0 when the checkpoint survives a power loss, on the others when their part is written."""
        draft = self._folder / _DRAFT
        if self._layout.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        policy.save(draft)
        dist.barrier()
        if self._layout.rank == 0:
            manifest = Manifest.of_folder(
                draft, step=step, policy_version=policy_version, ledger_epoch=epoch, layout=self._layout.name
            )
            manifest.write(draft)
            self._put_in_place(draft, self._folder / step_name(step))
            self._prune()

    def restore_latest(self, policy: Saveable) -> int:
        """The step of the newest whole checkpoint, now restored; 0 without one. Half-written ones are passed over."""
        found = newest(self._folder) or self._newest_to_load()
        self._require_agreement(found)
        if found is None:
            return 0
        folder, manifest = found
        if manifest.layout != self._layout.name:
            raise FailedPrecondition(
                f"checkpoint {folder} was written by a trainer of {manifest.layout}, this one is {self._layout.name}: "
                "start with the same parallel sizes, or train from an exported model"
            )
        policy.restore(folder)
        return manifest.step

    def _newest_to_load(self) -> tuple[Path, Manifest] | None:
        if self._load is None or self._load == self._folder:
            return None
        found = newest(self._load)
        if found is None:
            raise ConfigError(f"--load {self._load} holds no whole checkpoint: name a folder of step-… folders")
        return found

    def _put_in_place(self, draft: Path, target: Path) -> None:
        replaced = target.with_name(target.name + _REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        draft.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        for folder, _ in whole_checkpoints(self._folder)[KEPT:]:
            shutil.rmtree(folder)

    def _require_agreement(self, found: tuple[Path, Manifest] | None) -> None:
        step = -1 if found is None else found[1].step
        ends = torch.tensor([step, -step], dtype=torch.int64, device=self._layout.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        newest_step, oldest_step = int(ends[0]), -int(ends[1])
        if newest_step != oldest_step:
            raise FailedPrecondition(
                f"ranks see different checkpoints under {self._folder} (newest steps {oldest_step} and {newest_step}): "
                "use a folder that all machines share"
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
