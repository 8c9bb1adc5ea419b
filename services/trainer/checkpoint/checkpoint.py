"""Checkpoints: folders step-00000012/ with a file of every rank and a manifest.

Written under a hidden name (`.draft-EPOCH`), a checkpoint takes its own in one rename, so what is visible is whole. All
ranks take copies of their share at once; with `async_save` writing them goes on while the next step trains, in a thread
whose agreements have a process group of their own. Only when the new one is in place are older ones removed. A step
that is saved again takes the place of its older folder, which stays readable until the new one is there.

copied (in memory) → written (every rank's file is durable) → in place (the folder has its name, durably: safe) → pruned
A failure before that is raised on all ranks; nothing is safe then, the draft goes, and the next save begins afresh.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.errors import ConfigError, DataLoss, FailedPrecondition, Fenced, HeadraceError
from headrace.job.schema.run import CheckpointSection
from headrace.models.torch_dist import is_torch_dist
from headrace.rpc.log import log
from services.trainer.checkpoint.manifest import FileFacts, Manifest, versions
from services.trainer.checkpoint.ownership import FolderOwner
from services.trainer.checkpoint.random_state import PREFIX as RANDOM
from services.trainer.checkpoint.reader import CheckpointReader, all_true
from services.trainer.checkpoint.retention import Retention
from services.trainer.checkpoint.shard_chunk import Place, ShardChunk
from services.trainer.checkpoint.writer import read_notes, write_chunks
from services.trainer.files.agreement import CollectiveIO
from services.trainer.files.durable import make_folder, put_in_place, remove
from services.trainer.megatron.parallel import Layout
from services.trainer.state import TrainState

_PREFIX = "step-"
_DRAFT = ".draft-"
_REPLACED = ".replaced"
_PRUNED = ".pruned-"
_CPU = torch.device("cpu")


class Saveable(Protocol):
    """One rank's share of what a checkpoint holds."""

    def chunks(self) -> Iterable[ShardChunk]:
        """All ranks' chunks together are everything, each once."""

    def scalars(self) -> Mapping[str, Any]:
        """Numbers by part, equal on all ranks."""

    def restore(self, reader: CheckpointReader) -> None:
        """Takes this rank's share up again, bit for bit. Raises DataLoss that names what is missing."""


def checkpoint_folder(config: CheckpointSection, run_dir: Path) -> Path:
    """The folder of this run's checkpoints."""
    return config.save or run_dir / "checkpoints"


def step_name(step: int) -> str:
    """The folder of one checkpoint."""
    return f"{_PREFIX}{step:08d}"


def _is_new(folder: Path) -> bool:
    """Returns True for a folder that is absent or empty: the run that will fill it begins now."""
    return not folder.exists() or not any(folder.iterdir())


class Checkpoints:
    """All ranks call the same methods in the same order; the folder is one that all of them see."""

    def __init__(self, config: CheckpointSection, run_dir: Path, layout: Layout) -> None:
        self._folder = checkpoint_folder(config, run_dir)
        self._load = config.load
        self._in_background = config.async_save
        self._layout = layout
        self._owner = FolderOwner(self._folder, run_dir)
        self._retention = Retention.of(config, run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._safe: TrainState | None = None
        self._found: frozenset[str] = frozenset()

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of this step, whether or not there is one."""
        return self._folder / step_name(step)

    def claim(self, epoch: int) -> None:
        """Shuts older epochs out of the folder; for rank 0, which has restored. Raises Fenced, FailedPrecondition."""
        with self._owner.claimed(epoch):
            if new := _names(self._folder) - self._found:
                raise FailedPrecondition(
                    f"another trainer has saved {', '.join(sorted(new))} in {self._folder} while this one started: "
                    "start this trainer again"
                )

    def save(self, policy: Saveable, *, step: int, policy_version: int, epoch: int) -> None:
        """Takes the copies. Returns when the checkpoint survives a power loss; with async_save `take_safe` tells.

        A HeadraceError is raised on all ranks alike, which can go on: nothing was saved.
        """
        self.wait()
        work = CollectiveIO(self._layout.files_group, _CPU)
        draft = self._folder / f"{_DRAFT}{epoch}"
        work.do(lambda: self._begin(draft, epoch))
        chunks = work.do(lambda: [_copied(chunk) for chunk in policy.chunks()])
        state, scalars = TrainState(step, policy_version, epoch), dict(policy.scalars())
        self._writing = self._thread.submit(self._write, draft, chunks, scalars, state)
        if not self._in_background:
            self.flush()

    def wait(self) -> None:
        """Returns when nothing is being written. A failure that nobody has asked for is logged."""
        try:
            self.flush()
        except Fenced:
            raise
        except HeadraceError as error:
            log.warning("checkpoint_failed", reason=error.reason, error=error.message)

    def flush(self) -> None:
        """Waits for what is being written. Raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def take_safe(self) -> TrainState | None:
        """The newest state that became safe since the last time this was asked; None without one. Called on rank 0."""
        if self._writing is not None and self._writing.done():
            self.wait()
        safe, self._safe = self._safe, None
        return safe

    def restore_latest(self, policy: Saveable) -> int:
        """The step of the newest undamaged checkpoint, now restored; 0 without one. Damaged ones are passed over."""
        found = self._newest_true(self._folder)
        if found is None and self._load is not None and self._load != self._folder:
            found = self._newest_true(self._load)
            if found is None and not _is_new(self._load) and not is_torch_dist(self._load):
                raise ConfigError(f"--load {self._load} holds no whole checkpoint: name a folder of step-… folders")
        if found is None:
            return 0
        reader = CheckpointReader(*found)
        CollectiveIO(self._layout.files_group, _CPU).do(lambda: policy.restore(reader))
        self._require_all_read(reader, found[0])
        return found[1].step

    def _begin(self, draft: Path, epoch: int) -> None:
        if self._layout.rank == 0:
            with self._owner.claimed(epoch):
                for leftover in self._folder.glob(f"{_DRAFT}*"):
                    self._discard(leftover)
                make_folder(self._folder)
                draft.mkdir()

    def _write(self, draft: Path, chunks: list[ShardChunk], scalars: dict[str, Any], state: TrainState) -> None:
        work = CollectiveIO(self._layout.files_group, _CPU)
        try:
            notes = work.gather(work.do(lambda: write_chunks(draft, self._layout.rank, chunks)))
            work.do(lambda: self._finish(draft, notes, scalars, state))
        except HeadraceError:
            if self._layout.rank == 0:
                remove(draft)  # a full disk is not kept full
            raise
        if self._layout.rank == 0:
            self._safe = state
            self._prune()

    def _finish(self, draft: Path, notes: list[str], scalars: dict[str, Any], state: TrainState) -> None:
        if self._layout.rank == 0:
            self._manifest(state, scalars, *read_notes(notes)).write(draft)
            with self._owner.claimed(state.epoch):
                self._put_in_place(draft, self.path_of(state.step))

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
        replaced = target.with_name(f"{target.name}{_REPLACED}-{uuid.uuid4().hex[:8]}")
        if is_replaced := target.is_symlink() or target.exists():
            target.rename(replaced)
        put_in_place(draft, target)
        if is_replaced:
            self._discard(replaced)

    def _prune(self) -> None:
        """A checkpoint is safe by now, so what cannot be removed stays."""
        found = {manifest.step: folder for folder, manifest in reversed(whole_checkpoints(self._folder))}
        doubles = [p for p in self._folder.glob(f"{_PREFIX}*{_REPLACED}*") if _whose(p).exists()]
        try:
            for folder in (*doubles, *(found[step] for step in self._retention.superfluous(found))):
                if folder.is_symlink():
                    log.warning("checkpoint_kept", folder=str(folder), why="it is a symlink: remove it yourself")
                else:
                    self._discard(folder)
            for leftover in self._folder.glob(f"{_PRUNED}*"):
                remove(leftover)
        except OSError as error:
            log.warning("checkpoints_kept", folder=str(self._folder), error=str(error))

    def _discard(self, folder: Path) -> None:
        """Gives it a hidden name first: what is removed in part is never taken for a checkpoint."""
        hidden = folder.with_name(f"{_PRUNED}{uuid.uuid4().hex}")
        folder.rename(hidden)
        remove(hidden)

    def _newest_true(self, folder: Path) -> tuple[Path, Manifest] | None:
        """The newest whose every byte is true. Raises DataLoss when there are some and all are damaged."""
        whole = CollectiveIO(self._layout.files_group, _CPU).do(lambda: self._whole(folder))
        self._require_agreement(whole)
        for path, manifest in whole:
            if all_true(path, manifest, self._layout):
                return path, manifest
            log.warning("checkpoint_passed_over", folder=str(path), error="its bytes are not those that were written")
        if damaged := sorted(path.name for path in folder.glob(f"{_PREFIX}*")):
            raise DataLoss(
                f"every checkpoint in {folder} is damaged ({', '.join(damaged)}): replace one by a copy of it, or move "
                "them away to train from step 0"
            )
        return None

    def _whole(self, folder: Path) -> list[tuple[Path, Manifest]]:
        if folder == self._folder:
            self._found = _names(folder)
        return whole_checkpoints(folder)

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


def _whose(replaced: Path) -> Path:
    """The folder that took its place, or was about to."""
    return replaced.with_name(replaced.name.partition(_REPLACED)[0])


def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.glob(f"{_PREFIX}*"))


def newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest whole checkpoint in the folder, if there is one."""
    found = whole_checkpoints(folder)
    return found[0] if found else None


def _copied(chunk: ShardChunk) -> ShardChunk:
    """The chunk in CPU memory of its own: training goes on while it is written."""
    return replace(chunk, values=chunk.values.to("cpu", copy=True).contiguous())
