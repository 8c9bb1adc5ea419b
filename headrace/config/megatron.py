"""Megatron's arguments that headrace takes, by Megatron's own names.

Architecture flags are never needed: the checkpoint's config.json says it all. One that is given must agree with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.job import NonNegative, Positive, Section

Rate = Annotated[float, Field(ge=0)]


class ArchitectureArgs(Section):
    """Given for agreement only: each must equal what the checkpoint says."""

    num_layers: Positive | None = Field(None, description="Transformer layers.")
    hidden_size: Positive | None = Field(None, description="Width of the residual stream.")
    ffn_hidden_size: Positive | None = Field(None, description="Width of the MLP.")
    num_attention_heads: Positive | None = Field(None, description="Query heads.")
    num_query_groups: Positive | None = Field(None, description="Key/value heads.")
    kv_channels: Positive | None = Field(None, description="Width of a head.")
    max_position_embeddings: Positive | None = Field(None, description="Longest sequence.")
    vocab_size: Positive | None = Field(None, description="Rows of the embedding.")
    rotary_base: Annotated[float, Field(gt=0)] | None = Field(None, description="Base of the rotary frequencies.")
    rotary_percent: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Share of a head to rotate.")
    norm_epsilon: Annotated[float, Field(gt=0)] | None = Field(None, description="Epsilon of the norms.")
    normalization: Literal["RMSNorm", "LayerNorm"] | None = Field(None, description="Kind of norm.")
    swiglu: bool | None = Field(None, description="Gated SiLU in the MLP.")
    qk_layernorm: bool | None = Field(None, description="Norms on queries and keys.")
    add_qkv_bias: bool | None = Field(None, description="Biases on q, k and v.")
    untie_embeddings_and_output_weights: bool | None = Field(None, description="Output layer with weights of its own.")


class MegatronArgs(ArchitectureArgs):
    """Every Megatron flag there is; unknown ones are errors."""

    tensor_model_parallel_size: Positive = Field(1, description="Ranks that share every layer.")
    pipeline_model_parallel_size: Positive = Field(1, description="Stages of consecutive layers.")
    context_parallel_size: Positive = Field(1, description="Ranks that share a sequence; Transformer Engine only.")
    sequence_parallel: bool = Field(False, description="Share activations over tensor ranks; Transformer Engine only.")
    use_distributed_optimizer: bool = Field(False, description="Optimizer states are shared out over data ranks.")
    bf16: bool = Field(False, description="Weights and activations in bfloat16, fp32 master weights.")
    recompute_activations: bool = Field(False, description="Recompute attention in the backward pass.")
    lr: Rate = Field(1e-6, description="Highest learning rate.")
    min_lr: Rate = Field(0.0, description="Lowest learning rate.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = Field(
        "constant", description="How it falls."
    )
    lr_decay_iters: Positive | None = Field(None, description="Optimizer steps of the decay; absent: all.")
    lr_warmup_iters: NonNegative = Field(0, description="Optimizer steps of the warm-up.")
    weight_decay: Rate = Field(0.01, description="Decoupled weight decay.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="Decay of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="Decay of the second moment.")
    adam_eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Adam's epsilon.")
    clip_grad: Rate = Field(1.0, description="Largest gradient norm; 0: no clipping.")
