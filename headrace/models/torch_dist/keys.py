"""The names that Megatron-core gives a weight in a checkpoint.

Layers of one kind are stacked ([layers, …] under `decoder.layers.`), others have a number each; experts are stacked
within a layer, or have a number each too. A norm is named as Transformer Engine's fused layers have it, or as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.models.architecture import Architecture
from headrace.models.registry import table
from headrace.models.rows import FusedGateUp, GateUp, Row

FUSED_NORMS: Mapping[str, str] = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""A norm's name, and its name within the linear layer behind it in Transformer Engine."""
LAYERS = "decoder.layers."
EXPERTS = "mlp.experts.experts."
_HALVES = ("_w", "_v")


@dataclass(frozen=True, slots=True)
class Name:
    """A weight's name: of several keys, one below the other; of a stacked tensor, the part at `index`."""

    keys: tuple[str, ...]
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    """The sizes of the dimensions that `index` chooses from."""


def rows_of(architecture: Architecture) -> Iterator[tuple[Row, int | None]]:
    """Every row of the model with its layer."""
    rows = table(architecture)
    yield from ((row, None) for row in rows.first)
    for layer in range(rows.num_layers):
        yield from ((row, layer) for row in rows.layer(layer))
    yield from ((row, None) for row in rows.last)


def whole_shape(row: Row) -> tuple[int, ...]:
    """The shape of Megatron's parameter on a single rank."""
    first = row.hf[0].shape
    return (sum(tensor.shape[0] for tensor in row.hf), *first[1:])


def names(architecture: Architecture, row: Row, layer: int | None) -> Iterator[Name]:
    """Every name that a version of Megatron-core may have given the weight."""
    for name in _whole_names(architecture, row, layer):
        yield name
        if isinstance(row.sharding, GateUp | FusedGateUp):
            yield Name(tuple(name.keys[0] + half for half in _HALVES), name.index, name.stack)


def _whole_names(architecture: Architecture, row: Row, layer: int | None) -> Iterator[Name]:
    if layer is None:
        yield Name((row.megatron,))
        return
    layers = architecture.num_layers
    if row.expert is None or architecture.experts is None:
        for name in own_names(architecture, row):
            yield Name((f"{LAYERS}{layer}.{name}",))
            yield Name((LAYERS + name,), (layer,), (layers,))
        return
    expert, experts, name = row.expert, architecture.experts.count, row.megatron.rpartition("{expert}.")[2]
    yield Name((f"{LAYERS}{layer}.{EXPERTS}{name}",), (expert,), (experts,))
    yield Name((f"{LAYERS}{EXPERTS}{name}",), (layer, expert), (layers, experts))
    yield Name((f"{LAYERS}{layer}.{EXPERTS}{expert}.{name}",))


def own_names(architecture: Architecture, row: Row) -> list[str]:
    """The row's name within its layer, and the other one of a norm."""
    fuses = architecture.latent_attention is not None or not row.megatron.startswith("self_attention.")
    return [row.megatron, *([FUSED_NORMS[row.megatron]] if fuses and row.megatron in FUSED_NORMS else [])]
