"""Checks that a Hugging Face folder holds the tensors that its config.json asks for, and no others."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import ConfigError
from headrace.models.architecture import Architecture
from headrace.models.registry import table
from services.trainer.hugging_face.hf_folder import HfFolder

_TIED_HEAD = "lm_head.weight"
_SHOWN = 5
VISION_TOWER = "visual."
"""The names of its tensors begin with it."""


def check_names(source: HfFolder, architecture: Architecture) -> None:
    """Raises ConfigError that names the missing or the extra ones."""
    expected = {tensor.name for tensor in table(architecture).tensors()}
    found = {name for name in source.names if not name.endswith("rotary_emb.inv_freq")}
    found -= set(kept_names(found, architecture))
    if not architecture.untie_embeddings_and_output_weights:
        found.discard(_TIED_HEAD)  # some exporters write the tied head too
    if missing := sorted(expected - found):
        raise ConfigError(
            f"{source.folder} lacks {len(missing)} tensors that its config.json asks for: {missing[:_SHOWN]}"
        )
    if extra := sorted(found - expected):
        raise ConfigError(
            f"{source.folder} holds {len(extra)} tensors that its config.json does not name: {extra[:_SHOWN]}"
        )


def kept_names(names: Iterable[str], architecture: Architecture) -> list[str]:
    """Returns the names of what is not trained: layers that predict further tokens, and a vision tower."""
    layers = range(architecture.num_layers, architecture.num_layers + architecture.num_mtp_layers)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    if architecture.vision is not None:
        prefixes = (*prefixes, VISION_TOWER)
    return sorted(name for name in names if prefixes and name.startswith(prefixes))
