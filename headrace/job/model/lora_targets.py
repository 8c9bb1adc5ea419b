"""The linear layers of a model that LoRA adapts, chosen by the names that Hugging Face and peft give them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.errors import ConfigError
from headrace.job.schema.lora import ALL_LINEAR
from headrace.models.architecture import Architecture
from headrace.models.registry import table
from headrace.models.rows import Row

_WEIGHT = ".weight"


def lora_targets(architecture: Architecture, wanted: Sequence[str]) -> frozenset[str]:
    """The last words of the names of the layers that get an adapter, as `q_proj`.

    Raises ConfigError for a family whose layers cannot be adapted, and for a name that no layer has or experts have.
    """
    _require_family(architecture)
    rows = [row for layer in range(architecture.num_layers) for row in table(architecture).layer(layer)]
    linear = [row for row in rows if _is_linear(row)]
    of_experts = _names(row for row in linear if _is_of_experts(row))
    found = _names(linear) - of_experts
    chosen = found | of_experts if ALL_LINEAR in wanted else frozenset(wanted)
    if unknown := sorted(chosen - found - of_experts):
        raise ConfigError(
            f"lora_target_modules {unknown[0]} is not a linear layer of this model: choose from "
            f"{', '.join(sorted(found))}, or {ALL_LINEAR}",
            field="lora_target_modules",
        )
    if refused := sorted(chosen & of_experts):
        raise ConfigError(
            f"lora_target_modules {', '.join(refused)}: layers of experts have no adapters here: choose from "
            f"{', '.join(sorted(found))}",
            field="lora_target_modules",
        )
    return chosen


def layer_name(tensor: str) -> str:
    """The name of the layer that has this weight: model.layers.3.self_attn.q_proj."""
    return tensor.removesuffix(_WEIGHT)


def last_word(tensor: str) -> str:
    """Returns what lora_target_modules calls the layer that has this weight."""
    return layer_name(tensor).rpartition(".")[2]


def _names(rows: Iterable[Row]) -> frozenset[str]:
    return frozenset(last_word(tensor.name) for row in rows for tensor in row.hf)


def _is_linear(row: Row) -> bool:
    return row.megatron.endswith(_WEIGHT) and ".linear_" in row.megatron


def _is_of_experts(row: Row) -> bool:
    return row.expert is not None or ".shared_experts." in row.megatron


def _require_family(architecture: Architecture) -> None:
    for has_it, what in (
        (architecture.latent_attention, "latent attention"),
        (architecture.vision, "a vision tower"),
    ):
        if has_it is not None:
            raise ConfigError(
                f"lora_rank with {what} ({architecture.family}): such models have no adapters here: leave --lora-rank "
                "out",
                field="lora_rank",
            )
