"""Checkpoints: folders step-00000012/ with a file of every rank and a manifest, written in the background.

Written under a hidden name (`.draft-EPOCH`), a checkpoint takes its own in one rename, so what is visible is whole. All
ranks take copies of their share at once; with `async_save` writing them goes on while the next step trains, in a thread
whose agreements have a process group of their own. Only when the new one is in place are older ones removed. A step
that is saved again takes the place of its older folder, which stays readable until the new one is there.

copied (in memory) → written (every rank's file is durable) → in place (the folder has its name, durably: safe) → pruned
A failure before that is raised on all ranks; nothing is safe then, the draft goes, and the next save begins afresh.

A folder belongs to one run, and takes the checkpoints of its newest epoch only:
.owner.json  the run and its newest epoch; replaced when a trainer with a newer epoch, or another run, takes the folder
.alive       locked by the owner's rank 0 as long as it lives: another run is refused, not mixed in
.lock        locked while the owner is looked at and a checkpoint takes its place
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist

from headrace.disk import NoLocks, durable_write, lock
from headrace.errors import ConfigError, DataLoss, FailedPrecondition, Fenced, HeadraceError
from headrace.job.schema.run import CheckpointSection
from headrace.limits import object_of_line
from headrace.models.torch_dist import is_torch_dist
from headrace.rpc.log import log
from headrace.run_folder import step_of
from services.trainer.checkpoint.manifest import PACKAGES, RANK_FILE, Manifest, RankFile, ShardChunk
from services.trainer.checkpoint.resharding import RANDOM, CheckpointReader, all_true
from services.trainer.collective_io import CollectiveIO
from services.trainer.durable import make_folder, put_in_place, remove
from services.trainer.megatron.parallel import Layout
from services.trainer.state import TrainState

_PREFIX = "step-"
_DRAFT = ".draft-"
_REPLACED = ".replaced"
_PRUNED = ".pruned-"
_LOCK_SECONDS = 60.0


class CheckpointPart(Protocol):
    """One rank's share of what a checkpoint holds."""

    def chunks(self) -> Iterable[ShardChunk]:
        """All ranks' chunks together are everything, each once."""

    def scalars(self) -> Mapping[str, Any]:
        """Numbers by part, equal on all ranks."""

    def restore(self, reader: CheckpointReader) -> None:
        """Takes this rank's share up again, bit for bit. Raises DataLoss that names what is missing."""


def checkpoint_folder(config: CheckpointSection, run_dir: Path) -> Path:
    return config.save or run_dir / "checkpoints"


def step_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


class Checkpoints:
    """All ranks call the same methods in the same order; the folder is one that all of them see."""

    def __init__(self, config: CheckpointSection, run_dir: Path, layout: Layout) -> None:
        self._config = config
        self._folder = checkpoint_folder(config, run_dir)
        self._metrics_file = run_dir / "metrics.jsonl"
        self._layout = layout
        self._owner = FolderOwner(self._folder, run_dir)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._safe: TrainState | None = None
        self._names_at_restore: frozenset[str] = frozenset()

    def path_of(self, step: int) -> Path:
        return self._folder / step_name(step)

    def claim(self, epoch: int) -> None:
        """Shuts older epochs out of the folder; for rank 0, which has restored. Raises Fenced, FailedPrecondition."""
        with self._owner.claimed(epoch):
            if new := _names(self._folder) - self._names_at_restore:
                raise FailedPrecondition(
                    f"another trainer has saved {', '.join(sorted(new))} in {self._folder} while this one started: "
                    "start this trainer again"
                )

    def save(
        self,
        policy: CheckpointPart,
        *,
        step: int,
        policy_version: int,
        epoch: int,
        scored_by: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Takes the copies. Returns when the checkpoint survives a power loss; with async_save `take_safe` tells.

        `scored_by` counts the samples since the checkpoint before, by scorer and version.

        A HeadraceError is raised on all ranks alike, which can go on: nothing was saved.
        """
        self.wait()
        work = CollectiveIO(self._layout.files_group)
        draft = self._folder / f"{_DRAFT}{epoch}"
        work.do(lambda: self._begin(draft, epoch))
        # Copies in CPU memory, so that training can change the weights while they are written.
        chunks = work.do(
            lambda: [replace(c, values=c.values.to("cpu", copy=True).contiguous()) for c in policy.chunks()]
        )
        state, scalars = TrainState(step, policy_version, epoch), dict(policy.scalars())
        self._writing = self._thread.submit(self._write, draft, chunks, scalars, state, scored_by)
        if not self._config.async_save:
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

    def restore_latest(self, policy: CheckpointPart) -> int:
        """The step of the newest undamaged checkpoint, now restored; 0 without one. Damaged ones are passed over."""
        found, load = self._newest_true(self._folder), self._config.load
        if found is None and load is not None and load != self._folder:
            found = self._newest_true(load)
            if found is None and load.exists() and any(load.iterdir()) and not is_torch_dist(load):
                raise ConfigError(f"--load {load} holds no whole checkpoint: name a folder of step-… folders")
        if found is None:
            return 0
        reader = CheckpointReader(*found)
        CollectiveIO(self._layout.files_group).do(lambda: policy.restore(reader))
        self._require_all_read(reader, found[0])
        return found[1].step

    def _begin(self, draft: Path, epoch: int) -> None:
        if self._layout.rank == 0:
            with self._owner.claimed(epoch):
                for leftover in self._folder.glob(f"{_DRAFT}*"):
                    _discard(leftover)
                make_folder(self._folder)
                draft.mkdir()

    def _write(
        self,
        draft: Path,
        chunks: list[ShardChunk],
        scalars: dict[str, Any],
        state: TrainState,
        scored_by: Mapping[str, int],
    ) -> None:
        work = CollectiveIO(self._layout.files_group)
        try:
            file = work.do(lambda: RankFile.write(draft, self._layout.rank, chunks))
            files = [RANK_FILE.validate_json(text) for text in work.gather(json.dumps(asdict(file)))]
            work.do(lambda: self._finish(draft, files, scalars, state, scored_by))
        except HeadraceError:
            if self._layout.rank == 0:
                remove(draft)  # a full disk is not kept full
            raise
        if self._layout.rank == 0:
            self._safe = state
            self._prune()

    def _finish(
        self,
        draft: Path,
        files: Sequence[RankFile],
        scalars: dict[str, Any],
        state: TrainState,
        scored_by: Mapping[str, int],
    ) -> None:
        if self._layout.rank != 0:
            return
        manifest = Manifest(
            step=state.step,
            policy_version=state.policy_version,
            ledger_epoch=state.epoch,
            layout=self._layout.name,
            versions={package: version(package) for package in PACKAGES},
            scalars=scalars,
            files={file.name: file.facts for file in files},
            places=[place for file in files for place in file.places],
            scored_by=dict(scored_by),
        )
        manifest.write(draft)
        with self._owner.claimed(state.epoch):
            target = self.path_of(state.step)
            replaced = target.with_name(f"{target.name}{_REPLACED}-{uuid.uuid4().hex[:8]}")
            if is_replaced := target.is_symlink() or target.exists():
                target.rename(replaced)
            put_in_place(draft, target)
            if is_replaced:
                _discard(replaced)

    def _prune(self) -> None:
        """A checkpoint is safe by now, so what cannot be removed stays."""
        found = {manifest.step: folder for folder, manifest in reversed(whole_checkpoints(self._folder))}
        replaced = self._folder.glob(f"{_PREFIX}*{_REPLACED}*")
        doubles = [path for path in replaced if path.with_name(path.name.partition(_REPLACED)[0]).exists()]
        try:
            for folder in (*doubles, *(found[step] for step in superfluous(self._config, self._metrics_file, found))):
                if folder.is_symlink():
                    log.warning("checkpoint_kept", folder=str(folder), why="it is a symlink: remove it yourself")
                else:
                    _discard(folder)
            for leftover in self._folder.glob(f"{_PRUNED}*"):
                remove(leftover)
        except OSError as error:
            log.warning("checkpoints_kept", folder=str(self._folder), error=str(error))

    def _newest_true(self, folder: Path) -> tuple[Path, Manifest] | None:
        """The newest whose every byte is true. Raises DataLoss when there are some and all are damaged."""
        if folder == self._folder:
            self._names_at_restore = _names(folder)
        work = CollectiveIO(self._layout.files_group)
        whole = work.do(lambda: whole_checkpoints(folder))
        steps_of_ranks = work.gather(json.dumps([manifest.step for _, manifest in whole]))
        work.do(lambda: _require_same(folder, steps_of_ranks))
        for path, manifest in whole:
            if all_true(path, manifest, self._layout):
                return path, manifest
            log.warning("checkpoint_passed_over", folder=str(path), error="its bytes are not those that were written")
        if damaged := sorted(_names(folder)):
            raise DataLoss(
                f"every checkpoint in {folder} is damaged ({', '.join(damaged)}): replace one by a copy of it, or move "
                "them away to train from step 0"
            )
        return None

    def _require_all_read(self, reader: CheckpointReader, folder: Path) -> None:
        """Raises DataLoss that names tensors which no rank had a place for."""
        names = [name for name in reader.names if not name.startswith(RANDOM)]
        read = torch.tensor([name in reader.read_names for name in names], dtype=torch.int64)
        dist.all_reduce(read, op=dist.ReduceOp.MAX, group=self._layout.files_group)
        extra = [name for name, was_read in zip(names, read.tolist(), strict=True) if not was_read]
        if extra:
            raise DataLoss(
                f"checkpoint {folder} holds {len(extra)} tensors that this job has no place for: "
                f"{', '.join(extra[:5])}: resume with the settings it was saved with, or take its weights alone with "
                "--initial-megatron-checkpoint"
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


def superfluous(config: CheckpointSection, metrics_file: Path, steps: Iterable[int]) -> list[int]:
    """The steps among `steps` whose checkpoints may go.

    Those that stay are the newest, and those whose step did best: the one after which the checkpoint was taken.
    """
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[: config.keep_last])
    scores = _scores(config.keep_best_metric, metrics_file, set(newest_first)) if config.keep_best else {}
    best_first = sorted((s for s in newest_first if s in scores), key=lambda s: scores[s], reverse=True)
    return [step for step in newest_first if step not in kept | set(best_first[: config.keep_best])]


def _scores(metric: str, metrics_file: Path, steps: set[int]) -> dict[int, float]:
    """The metric of each of these steps; a step that was run again counts as it ran last."""
    if not metrics_file.is_file():
        return {}
    scores = {}
    with metrics_file.open("rb") as lines:
        for line in lines:
            # Of a million lines a few are decoded.
            if step_of(line) in steps and (row := object_of_line(line)) and metric in row:
                scores[int(row["step"])] = float(row[metric])
    return scores


def _require_same(folder: Path, steps_of_ranks: list[str]) -> None:
    """The steps as each rank sees them; on the first rank alone."""
    for rank, steps in enumerate(steps_of_ranks):
        if steps != steps_of_ranks[0]:
            raise FailedPrecondition(
                f"ranks see different checkpoints under {folder} (rank 0 steps {steps_of_ranks[0]}, rank {rank} "
                f"{steps}): use a folder that all machines share"
            )


def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.glob(f"{_PREFIX}*"))


def _discard(folder: Path) -> None:
    """Gives it a hidden name first: what is removed in part is never taken for a checkpoint."""
    hidden = folder.with_name(f"{_PRUNED}{uuid.uuid4().hex}")
    folder.rename(hidden)
    remove(hidden)


class FolderOwner:
    """The trainer of `run` as an owner of `folder`. Used on rank 0 alone."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._folder = folder
        self._run = str(run.absolute())
        self._alive: BinaryIO | None = None

    @contextmanager
    def claimed(self, epoch: int) -> Iterator[None]:
        """The folder is this trainer's, and nobody else's checkpoint takes its place inside the block.

        Raises Fenced when a newer trainer of the run has it, FailedPrecondition when another run's that lives has it.
        """
        make_folder(self._folder)
        with (self._folder / ".lock").open("wb") as file:
            if not _locked(file, _LOCK_SECONDS):
                raise FailedPrecondition(
                    f"another trainer ({self._owner()}) has held {file.name} for {_LOCK_SECONDS:.0f} s: end it"
                )
            self._take(epoch)
            yield

    def _take(self, epoch: int) -> None:
        owner = self._owner()
        is_ours = owner.get("run", self._run) == self._run
        if is_ours and owner.get("epoch", 0) > epoch:
            raise Fenced(
                f"{self._folder} takes checkpoints of epoch {owner['epoch']}, and this trainer has epoch {epoch}: "
                "a newer trainer has taken over: end this one"
            )
        if self._alive is None:
            alive = (self._folder / ".alive").open("wb")
            if _locked(alive):
                self._alive = alive
            else:
                alive.close()
        if self._alive is None and not is_ours:
            raise FailedPrecondition(
                f"{self._folder} belongs to run {owner['run']}, whose trainer is running (process {owner.get('pid')} "
                f"on {owner.get('host')}): end it, or pass another --save"
            )
        mine = {"run": self._run, "epoch": epoch, "host": socket.gethostname(), "pid": os.getpid()}
        if owner != mine:
            with durable_write(self._folder / ".owner.json") as draft:
                draft.write_text(json.dumps(mine))

    def _owner(self) -> dict[str, Any]:
        """{} when nobody has taken the folder yet, or the file says nothing that can be read."""
        path = self._folder / ".owner.json"
        try:
            found = json.loads(path.read_text())
            return {"run": str(found["run"]), "epoch": int(found["epoch"]), "host": found["host"], "pid": found["pid"]}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("owner_unreadable", file=str(path), error=str(error))
            return {}


def _locked(file: BinaryIO, wait_seconds: float = 0.0) -> bool:
    """True when the file is locked, until it is closed or the process ends; and on a file system without locks."""
    try:
        return lock(file, wait_seconds)
    except NoLocks as error:
        log.warning("no_locks", file=file.name, error=str(error))  # epochs fence the trainers of one run all the same
        return True
