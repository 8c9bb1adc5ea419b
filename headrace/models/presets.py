"""Presets: what a name stands for in a job, and whether a checkpoint is what the name says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.family import Preset
from headrace.models.registry import FAMILIES, architecture
from headrace.suggest import did_you_mean

PRESETS: Mapping[str, Preset] = {preset.name: preset for family in FAMILIES for preset in family.presets}

# Versions of a model differ in these; what its weights are does not depend on them.
_FREE = frozenset({"max_position_embeddings", "norm_epsilon", "rotary_base", "rope_scaling", "num_mtp_layers"})


def find(name: str) -> Preset:
    """Raises ConfigError for a name that is not listed."""
    if name not in PRESETS:
        raise ConfigError(
            f"model {name!r} is not known{did_you_mean(name, PRESETS)}: `headrace models` lists them", field="model"
        )
    return PRESETS[name]


def differences(preset: Preset, found: Architecture) -> Sequence[str]:
    """`num_layers 28, not 36` for everything in which the architecture is not the preset's."""
    mine, theirs = asdict(architecture(preset.config)), asdict(found)
    return [
        f"{name} {theirs[name]}, not {value}"
        for name, value in mine.items()
        if name not in _FREE and value != theirs[name]
    ]
