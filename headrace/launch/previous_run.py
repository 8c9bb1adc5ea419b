"""Reads what a previous start of a run left in its folder, and decides what a new start may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataLoss, FailedPrecondition, NotFound
from headrace.job.schema.job import Job, changed_options, changes
from headrace.job.schema.services import BufferSection
from headrace.limits import MAX_COUNTER, whole_number
from headrace.models.folders import is_whole
from headrace.run_folder import RunFolder

_CHECKPOINT = "step-"
_OF_THE_LEDGER: Mapping[str, Any] = {
    "rollout": ("rollout_batch_size", "n_samples_per_prompt"),
    "data": (
        *("prompt_data", "prompt_data_weights", "streaming_data", "num_data_workers", "data_source_path", "input_key"),
        *("label_key", "metadata_key", "tool_key", "priority_key", "rollout_shuffle", "rollout_seed", "num_epoch"),
        *("skip_bad_lines", "multimodal_keys"),
    ),
    "buffer": ("selection", "buffer_filter_path", "buffer_shards"),
}
"""Options that the ledger's groups were made with: `StreamConfig` without its limits."""


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """Steps are counted from 1, as on the console."""

    job: Job
    saved_step: int
    """The newest checkpoint's; 0 without one."""
    has_ledger: bool
    """Groups are there already, or in a database."""


def previous_run(run: RunFolder) -> PreviousRun | None:
    """None for a folder that no run has used, or that an earlier version of headrace wrote."""
    try:
        job = run.job()
    except (NotFound, DataLoss):
        return None
    has_ledger = job.buffer.buffer_store == "postgres" or has_files(run.ledger)
    return PreviousRun(job, saved_step(run, job), has_ledger)


def has_files(folder: Path) -> bool:
    """False for a folder that is not there, or has only folders without a file."""
    return any(path.is_file() for path in folder.rglob("*"))


def saved_step(run: RunFolder, job: Job) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(checkpoints_of(run, job), default=0)


def checkpoints_of(run: RunFolder, job: Job) -> dict[int, Path]:
    """Maps steps to their checkpoints. A folder with this name is complete."""
    folder = job.checkpoint.save or run.path / "checkpoints"
    return {
        step: path
        for path in folder.glob(f"{_CHECKPOINT}*")
        if (step := whole_number(path.name.removeprefix(_CHECKPOINT), MAX_COUNTER)) is not None
    }


def scored_by(checkpoint: Path) -> Mapping[str, int]:
    """The samples that were trained since the checkpoint before, by scorer and version; none where it does not say."""
    try:
        found: Mapping[str, int] = json.loads((checkpoint / "manifest.json").read_bytes())["manifest"]["scored_by"]
        return found
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_finished(run: RunFolder, job: Job) -> bool:
    """True when every step is in a checkpoint and the requested export exists."""
    exported = job.checkpoint.save_hf is None or is_whole(job.checkpoint.save_hf)
    return saved_step(run, job) >= job.rollout.num_rollout and exported


def has_ended(run: RunFolder) -> bool:
    """True when a launcher started services here and none of them is alive."""
    started = any(entry.pid is not None for entry in run.services().values())
    return started and not run.running_services()


def resumption(earlier: PreviousRun, job: Job) -> str:
    """Describes where this start continues and what changes.

    Raises FailedPrecondition for changes that the ledger would refuse.
    """
    refused = [each for each in changes(earlier.job, job) if each.name in _OF_THE_LEDGER.get(each.section, ())]
    if earlier.has_ledger and refused:
        first = refused[0]
        others = f" ({len(refused) - 1} more: {', '.join(each.flag for each in refused[1:])})" if refused[1:] else ""
        raise FailedPrecondition(
            f"run {earlier.job.run.run_name} was started with {first.flag} {first.old}, and its ledger has groups of "
            f"that kind; now it is {first.new}{others}: pass the old value to continue, or start a new run with "
            f"another "
            "--run-name"
        )
    where = f"resuming after step {earlier.saved_step}" if earlier.saved_step else "starting again: no checkpoint yet"
    return "; ".join([where, *changed_options(earlier.job, job)])


def differences(earlier: Job, job: Job) -> list[str]:
    """The options that decide what is trained and are not the same: `lora_rank 8 there, 16 here`."""
    return [f"{each.name} {each.old} there, {each.new} here" for each in changes(earlier, job) if each.is_told]


def require_shards(run: RunFolder, buffer: BufferSection) -> None:
    """Raises ConfigError when the run's ledger was made with another number of shards than would be started over it.

    A shard that is started by hand has the folder to itself; its own stream says which one it is.
    """
    there = _num_shards(run, buffer)
    if there in (None, buffer.buffer_shards) or buffer.buffer_shard is not None:
        return
    made_with = "one buffer" if there == 1 else f"{there} shards"
    raise ConfigError(
        f"the ledger of {run.path} was made with {made_with}, and buffer_shards is {buffer.buffer_shards}: a ledger "
        f"keeps its number of shards; pass --buffer-shards {there} to continue it, or start a new run with another "
        "--run-name"
    )


def _num_shards(run: RunFolder, buffer: BufferSection) -> int | None:
    """None for a run that has no ledger yet. A database does not say it; the run's earlier job does."""
    if has_files(run.ledger):
        return len([path for path in run.ledger.glob("shard-*") if path.is_dir()]) or 1
    earlier = previous_run(run) if buffer.buffer_store == "postgres" else None
    return None if earlier is None else earlier.job.buffer.buffer_shards
