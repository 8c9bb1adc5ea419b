"""Checks the folders from which the trainer takes weights: Hugging Face's, Megatron's and headrace's own."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.models.folders import NAMES_OF_WEIGHTS, damage_of
from headrace.models.registry import read_architecture
from headrace.models.torch_dist import TRACKER, is_torch_dist, matched

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def check_starting_weights(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a folder to start or resume from that holds no checkpoint, or another model's."""
    load, initial = job.checkpoint.load, job.checkpoint.initial_megatron_checkpoint
    if load and load.exists() and not load.is_dir():
        raise ConfigError(f"load {load} is not a folder: name the folder of checkpoints", field="load")
    if load and is_torch_dist(load):
        if initial is not None:
            raise ConfigError(
                f"load {load} is Megatron's, so its weights are those to start with, and initial_megatron_checkpoint "
                f"{initial} names others: give only one",
                field="load",
            )
        check_torch_dist("load", load, job)
    if initial and is_torch_dist(initial):
        check_torch_dist("initial_megatron_checkpoint", initial, job)
    elif initial and not (initial / "manifest.json").is_file():
        scope.missing(
            ConfigError(
                f"initial_megatron_checkpoint {initial} has no manifest.json, and no {TRACKER}: "
                "name a step-… folder of a headrace run, or a torch_dist folder of Megatron",
                field="initial_megatron_checkpoint",
            )
        )


def check_weights(option: str, folder: Path, job: Job, scope: Scope) -> None:
    """Raises ConfigError unless the folder holds a model's weights."""
    if is_torch_dist(folder):
        check_torch_dist(option, folder, job)
    else:
        check_model(option, folder, scope)


def check_torch_dist(option: str, folder: Path, job: Job) -> None:
    """Raises ConfigError unless Megatron's checkpoint is whole and of this job's model. Reads no weights."""
    if not (job.model.hf_checkpoint / "config.json").is_file():
        return  # on another machine
    try:
        matched(folder, read_architecture(job.model.hf_checkpoint))
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.message}", field=option) from error


def check_model(option: str, folder: Path, scope: Scope) -> None:
    """Raises ConfigError unless it is a Hugging Face folder with weights and a tokenizer."""
    if not folder.is_dir():
        scope.missing(ConfigError(f"{option} {folder} is not a folder: name a Hugging Face model folder", field=option))
        return
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(f"tokenizer ({' or '.join(_TOKENIZERS)})")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        scope.missing(
            ConfigError(f"{option} {folder} is not a complete model: it has no {', no '.join(missing)}", field=option)
        )
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    closed = sorted(path.name for path in files if not os.access(path, os.R_OK))
    if closed:
        scope.missing(
            ConfigError(
                f"{option} {folder}: user {os.getuid()} cannot read {', '.join(closed)}: chmod a+r, or, of a link, "
                "bring what it leads to",
                field=option,
            )
        )
    elif not missing and any((folder / name).is_file() for name in NAMES_OF_WEIGHTS) and (damage := damage_of(folder)):
        raise ConfigError(f"{option} {folder}: {damage}: copy or download it again", field=option)
