"""The table between a family's Hugging Face names and Megatron's: one row a Megatron parameter.

Layer rows have `{layer}` in both names. `decoder.layers` counts within a pipeline stage, `model.layers` over the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.config.architecture import Architecture
from services.trainer.models.shards import GateUp, QueryKeyValue, Replicated, Sharding, Split
from services.trainer.parallel import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """`megatron` is made of `hf`, in this order."""

    megatron: str
    hf: Sequence[str]
    sharding: Sharding


def table(architecture: Architecture) -> list[Row]:
    """Rows of a dense decoder (llama, qwen2, qwen3), in the order in which tensors travel."""
    qkv = QueryKeyValue(
        architecture.num_query_groups,
        architecture.num_attention_heads // architecture.num_query_groups,
        architecture.kv_channels,
    )
    mega, hf = "decoder.layers.{layer}", "model.layers.{layer}"
    projections = [f"{hf}.self_attn.{p}_proj" for p in "qkv"]
    rows = [
        Row("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], Split(0)),
        Row(f"{mega}.input_layernorm.weight", [f"{hf}.input_layernorm.weight"], Replicated()),
        Row(f"{mega}.self_attention.linear_qkv.weight", [f"{p}.weight" for p in projections], qkv),
    ]
    if architecture.add_qkv_bias:
        rows.append(Row(f"{mega}.self_attention.linear_qkv.bias", [f"{p}.bias" for p in projections], qkv))
    if architecture.qk_layernorm:
        rows += [
            Row(f"{mega}.self_attention.{p}_layernorm.weight", [f"{hf}.self_attn.{p}_norm.weight"], Replicated())
            for p in "qk"
        ]
    rows += [
        Row(f"{mega}.self_attention.linear_proj.weight", [f"{hf}.self_attn.o_proj.weight"], Split(1)),
        Row(f"{mega}.pre_mlp_layernorm.weight", [f"{hf}.post_attention_layernorm.weight"], Replicated()),
        Row(f"{mega}.mlp.linear_fc1.weight", [f"{hf}.mlp.{p}_proj.weight" for p in ("gate", "up")], GateUp()),
        Row(f"{mega}.mlp.linear_fc2.weight", [f"{hf}.mlp.down_proj.weight"], Split(1)),
        Row("decoder.final_layernorm.weight", ["model.norm.weight"], Replicated()),
    ]
    if architecture.untie_embeddings_and_output_weights:
        rows.append(Row("output_layer.weight", ["lm_head.weight"], Split(0)))
    return rows


def stage_rows(architecture: Architecture, layout: Layout) -> Iterator[Row]:
    """The rows of this pipeline stage, layers written out. With tied embeddings the last stage's copy has no row."""
    per_stage = architecture.num_layers // layout.pp_size
    rows = table(architecture)
    layer_rows = [row for row in rows if "{layer}" in row.megatron]
    for row in rows:
        if row.megatron.startswith("embedding"):
            if layout.is_first_stage:
                yield row
        elif row is layer_rows[0]:
            for local in range(per_stage):
                for layer_row in layer_rows:
                    yield _at_layer(layer_row, local, layout.pp_rank * per_stage + local)
        elif row not in layer_rows and layout.is_last_stage:
            yield row


def _at_layer(row: Row, local: int, layer: int) -> Row:
    return Row(row.megatron.format(layer=local), [name.format(layer=layer) for name in row.hf], row.sharding)
