"""Relates a job to its model: parallel sizes, virtual stages, the layers of LoRA, and Megatron's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from headrace.errors import ConfigError
from headrace.job.megatron import ARCHITECTURAL, MegatronArgs
from headrace.job.schema.training import ALL_LINEAR
from headrace.models.architecture import (
    Architecture,
    Experts,
    LatentAttention,
    LinearAttention,
    Llama3Rope,
    Mamba,
    YarnRope,
    is_same_setting,
)
from headrace.models.family import HfTensor, Row, Transposed, TransposedGateUp
from headrace.models.registry import table

_CUT_BY_TENSOR_RANKS = ("vocab_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
_CUT_IN_LINEAR_ATTENTION = {LinearAttention: ("num_key_heads", "num_value_heads"), Mamba: ("num_heads", "num_groups")}


def check_layout(architecture: Architecture, args: MegatronArgs) -> None:
    """Raises ConfigError for the first size that does not divide its number of layers, heads or experts."""
    _tensor(architecture, args)
    _pipeline(architecture, args)
    _check_experts(architecture, args)


def _tensor(architecture: Architecture, args: MegatronArgs) -> None:
    ranks = args.tensor_model_parallel_size
    sizes = {name: getattr(architecture, name) for name in _CUT_BY_TENSOR_RANKS}
    if linear := architecture.linear_attention:
        kind = "mamba" if isinstance(linear, Mamba) else "linear"
        sizes |= {f"{kind}_{name}": getattr(linear, name) for name in _CUT_IN_LINEAR_ATTENTION[type(linear)]}
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"tensor_model_parallel_size {ranks} does not divide {name} {size}: choose a divisor of it"
            )


def _pipeline(architecture: Architecture, args: MegatronArgs) -> None:
    if (
        args.pipeline_model_parallel_layout
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    ):
        return
    stages = args.pipeline_model_parallel_size
    ends = (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage)
    given = [layers for layers in ends if layers is not None]
    if (architecture.num_layers - sum(given)) % max(1, stages - len(given)):
        raise ConfigError(
            f"pipeline_model_parallel_size {stages} does not divide num_layers {architecture.num_layers}: "
            "choose a divisor of it, or pass --num-layers-in-last-pipeline-stage"
        )


def _check_experts(architecture: Architecture, args: MegatronArgs) -> None:
    ranks = args.expert_model_parallel_size
    if architecture.experts is None:
        if ranks > 1:
            raise ConfigError(
                f"expert_model_parallel_size {ranks}: this {architecture.family} model has no experts: leave it out"
            )
        return
    if architecture.experts.count % ranks:
        raise ConfigError(
            f"expert_model_parallel_size {ranks} does not divide the {architecture.experts.count} experts: "
            "choose a divisor of it"
        )
    tensor, within = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if ranks == 1 and within not in (None, tensor):
        raise ConfigError(
            f"expert_tensor_parallel_size {within} with tensor_model_parallel_size {tensor}: Megatron-core sums the "
            "gradients of such experts over too few ranks: add --expert-model-parallel-size 2 or more, or leave "
            "--expert-tensor-parallel-size out"
        )
    if tensor > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size {tensor} with experts: Megatron-core trains them only with "
            "--sequence-parallel: add it, or divide the experts alone: "
            f"--expert-model-parallel-size {tensor}"
        )
    if architecture.add_bias_linear and (within or tensor) > 1:
        raise ConfigError(
            f"{within or tensor} tensor ranks in each expert: Megatron-core does not divide experts with biases: pass "
            "--expert-tensor-parallel-size 1 with --expert-model-parallel-size 2 or more"
        )


# Computes how many virtual stages a pipeline rank has.
#
# Ranks alternate between these stretches of layers and so wait less for each other (interleaved schedule,
# https://arxiv.org/abs/2104.04473).

_OTHER_CUTS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def virtual_stages(architecture: Architecture, args: MegatronArgs) -> int:
    """The number of stages on each rank; 1 when the job asks for none.

    Raises ConfigError when the layers cannot be divided in this way. Megatron itself checks stages of uneven length.
    """
    if args.num_layers_per_virtual_pipeline_stage is not None:
        stages = _of_so_many_layers(args.num_layers_per_virtual_pipeline_stage, architecture.num_layers, args)
    else:
        stages = args.virtual_pipeline_model_parallel_size or 1
        ranks, num_layers = args.pipeline_model_parallel_size, architecture.num_layers
        if stages > 1 and num_layers % (ranks * stages) and not _cuts_otherwise(args):
            raise ConfigError(
                f"num_virtual_stages_per_pipeline_rank {stages} x pipeline_model_parallel_size {ranks} does not divide "
                f"num_layers {num_layers}: choose a divisor of {num_layers / ranks:g}"
            )
    if stages > 1 and args.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"{stages} virtual stages on one pipeline rank have no effect: pass "
            "--pipeline-model-parallel-size 2 or more, or leave them out"
        )
    return stages


def _of_so_many_layers(layers: int, num_layers: int, args: MegatronArgs) -> int:
    if args.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            "num_layers_per_virtual_pipeline_stage and num_virtual_stages_per_pipeline_rank set the "
            "same thing: give only one"
        )
    if cut := _cuts_otherwise(args):
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {layers} with {', '.join(cut)}: the stages would differ in "
            f"length: pass "
            "--num-virtual-stages-per-pipeline-rank"
        )
    ranks = args.pipeline_model_parallel_size
    if num_layers % (ranks * layers):
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {layers} x pipeline_model_parallel_size {ranks} does not divide "
            f"num_layers {num_layers}: choose a divisor of {num_layers / ranks:g}"
        )
    return num_layers // (ranks * layers)


def _cuts_otherwise(args: MegatronArgs) -> list[str]:
    return [name for name, value in args.given(frozenset(_OTHER_CUTS)).items() if value]


_ALWAYS = {
    "position_embedding_type": "rope",
    "no_position_embedding": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "use_rotary_position_embeddings": True,
}


def megatron_fields(a: Architecture) -> dict[str, Any]:
    """Every field that follows from the checkpoint, except the activation and dtypes, which are objects of torch."""
    fields: dict[str, Any] = {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.kv_channels,
        "layernorm_epsilon": a.norm_epsilon,
        "normalization": a.normalization,
        "gated_linear_unit": not a.squared_relu,
        "add_bias_linear": a.add_bias_linear,
        "add_qkv_bias": a.add_qkv_bias,
        # Latent attention always has its norms.
        "qk_layernorm": a.qk_layernorm or a.latent_attention is not None,
        "rotary_interleaved": a.rotary_interleaved,
        "attention_output_gate": a.attention_output_gate,
        "layernorm_zero_centered_gamma": a.layernorm_zero_centered_gamma,
        "no_rope_freq": [int(layer in a.unrotated_layers) for layer in range(a.num_layers)]
        if a.unrotated_layers
        else None,
    }
    if a.softmax_scale is not None:
        fields["softmax_scale"] = a.softmax_scale
    if a.attention_sinks:
        fields["softmax_type"] = "learnable"
    if a.windows:
        fields["window_size"] = (a.windows.size - 1, 0)  # tokens before it, tokens after it
        fields["window_attn_skip_freq"] = [int(layer in a.windows.layers) for layer in range(a.num_layers)]
    if a.swiglu_limit is not None:
        fields |= {"activation_func_clamp_value": a.swiglu_limit, "glu_linear_offset": 1.0}
    if a.experts:
        fields |= _expert_fields(a.experts, a.num_layers)
    if a.latent_attention:
        fields |= _latent_attention(a, a.latent_attention)
    if a.linear_attention:
        fields |= _linear_attention(a.linear_attention, a.num_layers)
    return fields


def _linear_attention(linear: LinearAttention | Mamba, num_layers: int) -> dict[str, Any]:
    if isinstance(linear, Mamba):
        return {
            "mamba_num_heads": linear.num_heads,
            "mamba_head_dim": linear.head_dim,
            "mamba_num_groups": linear.num_groups,
            "mamba_state_dim": linear.state_size,
        }
    return {
        "linear_attention_freq": [int(layer in linear.layers) for layer in range(num_layers)],
        "linear_conv_kernel_dim": linear.conv_kernel_dim,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
    }


def _expert_fields(experts: Experts, num_layers: int) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.topk,
        "moe_layer_freq": [int(experts.in_layer(layer)) for layer in range(num_layers)],
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_score_function": experts.score_function,
        # Scores of all experts first, then the best: then they do not sum to one.
        "moe_router_pre_softmax": experts.score_function == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_enable_expert_bias": experts.has_router_bias,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.groups_per_token,
        "moe_router_dtype": "fp32",
    }


def _latent_attention(a: Architecture, mla: LatentAttention) -> dict[str, Any]:
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": a.rotary_base,
        "rotary_percent": a.rotary_percent,
    }
    if not isinstance(a.rope_scaling, YarnRope):
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = a.rope_scaling
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _in_scripts(a: Architecture, given: MegatronArgs) -> dict[str, Any]:
    """Values of flags that only Megatron's script has; its configs have other names for them."""
    rope = a.rope_scaling
    family = given.spec[0].rpartition(".")[2] if given.spec else ""
    return {
        "group_query_attention": a.num_query_groups < a.num_attention_heads,
        "multi_latent_attention": a.latent_attention is not None,
        "disable_bias_linear": not a.add_bias_linear,
        "post_self_attn_layernorm": a.post_norms,
        "post_mlp_layernorm": a.post_norms,
        # Not for Megatron's config, which would then refuse context parallelism: its own layers have none.
        "experimental_attention_variant": "gated_delta_net"
        if isinstance(a.linear_attention, LinearAttention)
        else None,
        "use_rope_scaling": isinstance(rope, Llama3Rope),
        "spec": given.spec if family in (a.family, a.family.removesuffix("_text").removesuffix("_moe")) else a.family,
    } | ({"rotary_scaling_factor": rope.factor} if isinstance(rope, Llama3Rope) else {})


def _means_nothing(a: Architecture, name: str, wanted: Any) -> bool:
    """True for a flag that Megatron-core does not read for this architecture, though launch scripts often pass it."""
    if a.latent_attention is not None and name in ("kv_channels", "num_query_groups", "group_query_attention"):
        return True
    if a.experts is None:
        return False
    if name in ("moe_router_num_groups", "moe_router_group_topk"):
        return wanted == 1 and a.experts.num_groups is None
    return name == "moe_router_pre_softmax" and a.experts.score_function == "sigmoid"


def _agrees(a: Architecture, name: str, wanted: Any, said: Any) -> bool:
    if name == "no_rope_freq" and isinstance(wanted, int):
        return list(said or ()) == [int(not (layer + 1) % wanted) for layer in range(a.num_layers)]
    if name == "linear_attention_freq" and isinstance(wanted, int):
        return list(said or ()) == [int(bool((layer + 1) % wanted)) for layer in range(a.num_layers)]
    if name == "window_attn_skip_freq" and isinstance(wanted, int):
        return list(said or ()) == [int(bool((layer + 1) % wanted)) for layer in range(a.num_layers)]
    if isinstance(said, list):  # Megatron takes a list of the layers, or says that every n-th has experts
        return list(wanted) == said if isinstance(wanted, tuple) else _every(a.num_layers, wanted) == said
    return is_same_setting(wanted, said)


def _every(num_layers: int, nth: int) -> list[int]:
    return [int(layer % nth == 0) for layer in range(num_layers)] if nth > 0 else []


def _shown(value: Any) -> str:
    return " ".join(str(each) for each in value) if isinstance(value, list | tuple) else str(value)


def contradictions(a: Architecture, given: MegatronArgs) -> list[str]:
    """A sentence for each architecture flag that differs from the checkpoint."""
    mine = asdict(a) | megatron_fields(a) | _ALWAYS | _in_scripts(a, given)
    wrong = [
        f"--{name.replace('_', '-')} {_shown(wanted)} contradicts the checkpoint, whose config.json says "
        f"{_shown(mine.get(name, 'nothing about it'))}: leave the flag out"
        for name, wanted in given.given(ARCHITECTURAL).items()
        if not _agrees(a, name, wanted, mine.get(name, False)) and not _means_nothing(a, name, wanted)
    ]
    if given.seq_length is not None and given.seq_length > a.max_position_embeddings:
        wrong.append(
            f"--seq-length {given.seq_length} is longer than max_position_embeddings {a.max_position_embeddings} of "
            "the checkpoint: leave the flag out"
        )
    return wrong


_WEIGHT = ".weight"


def adapted_layers(architecture: Architecture, wanted: Sequence[str]) -> list[HfTensor]:
    """The weights of the layers that get an adapter, out × in, in the table's order.

    Experts that a checkpoint has in one tensor get one by their name alone, as in peft. Raises ConfigError for a name
    that no layer has.
    """
    rows = [row for layer in range(architecture.num_layers) for row in table(architecture).layer(layer)]
    linear = [_out_in(tensor, row) for row in rows if _is_linear(row) for tensor in row.hf]
    if ALL_LINEAR in wanted:
        return [tensor for tensor in linear if tensor.slot is None]
    known = {last_word(tensor.name) for tensor in linear}
    if unknown := sorted(set(wanted) - known):
        raise ConfigError(
            f"lora_target_modules {unknown[0]} is not a linear layer of this model: choose from "
            f"{', '.join(sorted(known))}, or {ALL_LINEAR}"
        )
    return [tensor for tensor in linear if last_word(tensor.name) in wanted]


_SERVED_BESIDE = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Layers whose adapters SGLang serves beside the weights."""


def adapted_names(architecture: Architecture, wanted: Sequence[str]) -> list[str]:
    """What lora_target_modules calls the layers that get an adapter, and what peft calls them: q_proj and others."""
    return sorted({last_word(tensor.name) for tensor in adapted_layers(architecture, wanted)})


def check_served_adapters(architecture: Architecture, wanted: Sequence[str]) -> None:
    """Raises ConfigError for adapters that engines cannot serve beside their weights."""
    if architecture.vision is not None or "vision_tower." in architecture.kept:
        raise ConfigError(
            "update_weight_transport adapter with a model that reads images has not been tried: leave it out, and "
            "engines get merged weights",
            field="update_weight_transport",
        )
    for tensor in adapted_layers(architecture, wanted):
        is_expert = "expert" in tensor.name
        if is_expert or last_word(tensor.name) not in _SERVED_BESIDE:
            raise ConfigError(
                f"update_weight_transport adapter with an adapter on {layer_name(tensor.name)}: SGLang serves those of "
                f"{', '.join(sorted(_SERVED_BESIDE))} outside of experts. Name layers with --lora-target-modules, or "
                "leave --update-weight-transport out: engines then get merged weights",
                field="update_weight_transport",
            )


def check_adapters(architecture: Architecture, args: MegatronArgs, wanted: Sequence[str]) -> None:
    """Raises ConfigError for a name that no layer has, and for experts whose adapters this layout cannot train."""
    layers, within = adapted_layers(architecture, wanted), args.expert_tensor_parallel_size
    tensor = args.tensor_model_parallel_size
    if any(args.given(frozenset({"use_transformer_engine_op_fuser"})).values()):
        raise ConfigError(
            "use_transformer_engine_op_fuser with lora_rank: its fused MLP passes by the layers that have adapters: "
            "leave one of them out"
        )
    if within not in (None, 1, tensor) and any(".experts." in layer.name for layer in layers):
        raise ConfigError(
            f"expert_tensor_parallel_size {within} with adapters on experts: it must be 1 or "
            f"tensor_model_parallel_size, {tensor}: change it, or leave the experts out of --lora-target-modules"
        )


def layer_name(tensor: str) -> str:
    """The name of the layer that has this weight: model.layers.3.self_attn.q_proj."""
    return tensor.removesuffix(_WEIGHT)


def last_word(tensor: str) -> str:
    """Returns what lora_target_modules calls the layer that has this weight."""
    return layer_name(tensor).rpartition(".")[2]


def _is_linear(row: Row) -> bool:
    return row.megatron.endswith(_WEIGHT) and ".linear_" in row.megatron


def _out_in(tensor: HfTensor, row: Row) -> HfTensor:
    is_transposed = isinstance(row.sharding, Transposed | TransposedGateUp)
    return replace(tensor, shape=tensor.shape[::-1]) if is_transposed else tensor
