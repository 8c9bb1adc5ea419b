"""Megatron's arguments under its own names: every field of its configs, typed, and its trainer's additional flags.

Architecture is never needed, because the checkpoint's config.json has it. Architecture flags must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.job.megatron.fields import OBJECTS, MegatronFields
from headrace.job.schema.section import NonNegative, Positive, Rate, literal

_TERM = re.compile(r"\[([0-9](?:,[0-9])*)\](?:\*([0-9]{1,3}))?")
_MAX_CHARACTERS = 4096


def _from_text(value: Any) -> Any:
    """Adds repeated lists up to one list; any other value is left to the field's type."""
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return value
    terms = [_TERM.fullmatch(term) for term in value.replace(" ", "").split("+")]
    layers: list[int] = []
    for term in terms:
        if term is None:
            return literal(value)
        layers += [int(digit) for digit in term[1].split(",")] * int(term[2] or 1)
    return layers


LayerPattern = BeforeValidator(_from_text)


def _names(words: str) -> list[str]:
    return words.split()


_INITIAL = "weights come from the checkpoint"
_DTYPE = "it follows --bf16"
_ENGINES = "engines generate, the trainer never does"
_RESUME = "a resumed run always continues its own schedule"
_FSDP = "headrace's checkpoints know Megatron's distributed optimizer, not its FSDP"
_STATES = "its states are in a form that headrace's checkpoints do not hold"
_SWAPS = "headrace swaps and sends whole weights between steps, which a gather in flight would overtake"
_SCALER = "half precision with loss scaling is not supported, use --bf16"
_LOG_PROBS = "headrace computes log-probs itself, chunk by chunk"
_MEASURES = "headrace measures and reports where the time goes itself"
_OWN_SHARDING = "it follows the checkpoint and the layout"

_REASONS: Mapping[str, Sequence[str]] = {
    _INITIAL: _names("""
        perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std
        embedding_init_method_std
    """),
    _DTYPE: _names("""
        params_dtype pipeline_dtype enable_autocast autocast_dtype main_params_dtype
    """),
    _ENGINES: _names("""
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents nccl_all_reduce_for_prefill
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        moe_pad_experts_for_cuda_graph_inference
    """),
    _RESUME: _names("""
        use_checkpoint_opt_param_scheduler override_opt_param_scheduler
    """),
    _FSDP: _names("""
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy
        preserve_fp32_weights fsdp_double_buffer fsdp_manual_registration suggested_communication_unit_size
        num_distributed_optimizer_instances fsdp_db_use_persist_buf_on_alloc_fail
        fsdp_all_gather_in_start_param_sync megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
    """),
    _STATES: _names("""
        main_grads_dtype exp_avg_dtype exp_avg_sq_dtype use_layer_wise_distributed_optimizer
    """),
    _SWAPS: _names("""
        overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather
        reuse_grad_buf_for_mxfp8_param_ag fp8_param fp8_param_gather fp4_param fp4_param_gather
        keep_fp8_transpose_cache
    """),
    _SCALER: _names("""
        fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
    """),
    _LOG_PROBS: _names("""
        cross_entropy_loss_fusion cross_entropy_fusion_impl
    """),
    _MEASURES: _names("""
        barrier_with_L1_time config_logger_dir moe_per_layer_logging test_mode
    """),
    _OWN_SHARDING: _names("""
        variable_seq_lengths transformer_impl hetereogenous_dist_checkpoint
    """),
    "virtual stages take turns in rounds of one micro-batch for each pipeline rank": _names("""
        microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush
    """),
    "it is an option of [train]": _names("""
        calculate_per_token_loss
    """),
    "--use-routing-replay and --use-rollout-routing-replay do that": _names("""
        moe_enable_routing_replay
    """),
    "it is a Python object, which no flag can give": sorted(OBJECTS),
}

RESERVED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""What headrace decides, and why."""

ARCHITECTURAL = frozenset(
    _names("""
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        max_position_embeddings vocab_size rotary_base rotary_percent norm_epsilon normalization swiglu
        qk_layernorm add_qkv_bias untie_embeddings_and_output_weights position_embedding_type
        no_position_embedding disable_bias_linear add_bias_linear tokenizer_type spec num_moe_experts
        group_query_attention use_rotary_position_embeddings use_rope_scaling multi_latent_attention
        post_self_attn_layernorm post_mlp_layernorm
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
        moe_router_score_function moe_router_enable_expert_bias moe_router_pre_softmax moe_latent_size
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor
        original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mtp_num_layers
        mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone
        mtp_loss_scaling_factor rotary_interleaved window_size window_attn_skip_freq softmax_scale softmax_type
        glu_linear_offset activation_func_clamp_value apply_residual_connection_post_layernorm
        layernorm_zero_centered_gamma qk_l2_norm attention_output_gate no_rope_freq
        experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads use_mup mup_width_mult
        mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
        mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        mamba_training_ssm_states_dtype use_mamba_mem_eff_path mlp_chunks_for_training heterogeneous_block_specs
    """)
)
"""What the checkpoint's config.json says: given for agreement only, never passed on."""

GPU_ONLY = frozenset(
    _names("""
        hierarchical_context_parallel_sizes hybrid_context_parallel
        max_seqlen_per_dp_cp_rank cp_comm_type tp_comm_overlap delay_wgrad_compute gradient_accumulation_fusion
        masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope
        use_fused_weighted_squared_relu persist_layer_norm memory_efficient_layer_norm batch_p2p_comm
        overlap_p2p_comm cpu_offloading fine_grained_activation_offloading enable_cuda_graph external_cuda_graph
        optimizer_cuda_graph fp8 fp4 fp8_dot_product_attention fp8_multi_head_attention use_te_rng_tracker
        use_te_activation_func use_transformer_engine_op_fuser moe_permute_fusion moe_router_fusion
        moe_grouped_gemm moe_enable_deepep moe_shared_expert_overlap overlap_moe_expert_parallel_comm nccl_ub
        mla_down_proj_fusion
    """)
)
"""What Megatron-core does only on a GPU, most of it with Transformer Engine."""

OPTIMIZER_ON_GPU = frozenset(
    _names("""
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params use_precision_aware_optimizer
        store_param_remainders
    """)
)
"""Where the optimizer keeps its states beside a GPU. They change no result, so they are left out on a CPU."""

OTHER_STATES = ("optimizer_cpu_offload", "use_precision_aware_optimizer")
"""Those with which the states have a form that headrace's checkpoints do not hold."""


MEGATRON_ALIASES: Mapping[str, str] = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "end_weight_decay": "end_wd",
    "fp8_format": "fp8",
    "layernorm_epsilon": "norm_epsilon",
    "gated_linear_unit": "swiglu",
    "lr_decay_steps": "lr_decay_iters",
    "lr_warmup_init": "init_lr",
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_wsd_decay_iters": "wsd_decay_steps",
    "max_lr": "lr",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "rope_fusion": "apply_rope_fusion",
    "start_weight_decay": "start_wd",
    "use_gated_attention": "attention_output_gate",
    "weight_decay_incr_style": "wd_incr_style",
}
"""Other names of fields: those of Megatron's own training script, or those of its classes."""


def _none(dropout: float) -> float:
    if dropout:
        raise ValueError("should be 0: a policy's log-probs must be the same in every pass")
    return dropout


NoDropout = Annotated[float, AfterValidator(_none)]


class ArchitectureArgs(MegatronFields):
    """Architecture flags of existing scripts that Megatron's configs do not have, or name otherwise.

    Each must equal the checkpoint's value, as those of its configs must.
    """

    max_position_embeddings: Positive | None = Field(None, description="Longest sequence.")
    vocab_size: Positive | None = Field(None, description="Rows of the embedding.")
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Epsilon of the norms.")
    swiglu: bool | None = Field(None, description="Gated SiLU in the MLP.")
    untie_embeddings_and_output_weights: bool | None = Field(None, description="Output layer with weights of its own.")
    position_embedding_type: Literal["rope"] | None = Field(None, description="How positions are known.")
    no_position_embedding: bool | None = Field(None, description="No learned positions: they are rotary.")
    disable_bias_linear: bool | None = Field(None, description="No biases in linear layers.")
    seq_length: Positive | None = Field(None, description="Longest sequence; at most max_position_embeddings.")
    tokenizer_type: Literal["HuggingFaceTokenizer"] | None = Field(None, description="The checkpoint's own.")
    group_query_attention: bool | None = Field(None, description="Fewer key/value heads than query heads.")
    use_rotary_position_embeddings: bool | None = Field(None, description="Positions are rotary.")
    use_rope_scaling: bool | None = Field(None, description="Llama 3's stretched rotary frequencies.")
    post_self_attn_layernorm: bool | None = Field(None, description="A norm behind attention too.")
    post_mlp_layernorm: bool | None = Field(None, description="A norm behind the MLP too.")
    moe_layer_freq: Annotated[int | tuple[int, ...], LayerPattern] | None = Field(
        None, description="Which layers have experts: 1, [0,1,1] or [0]*1+[1]*45."
    )
    spec: tuple[str, ...] = Field((), description="Module and function of slime's model: must be the checkpoint's.")
    train_backend: Literal["megatron"] | None = Field(None, description="The trainer's only one.")


class MegatronArgs(ArchitectureArgs):
    """All Megatron flags; unknown ones are errors. None stands for Megatron's own default."""

    tensor_model_parallel_size: Positive = Field(1, description="Ranks that share every layer.")
    pipeline_model_parallel_size: Positive = Field(1, description="Stages of consecutive layers.")
    virtual_pipeline_model_parallel_size: Positive | None = Field(
        None, description="Virtual stages of a pipeline rank, which take turns; absent: its layers are one stage."
    )
    num_layers_per_virtual_pipeline_stage: Positive | None = Field(
        None, description="The same by the number of layers in each."
    )
    expert_model_parallel_size: Positive = Field(1, description="Ranks that share out the experts of a layer.")
    expert_tensor_parallel_size: Positive | None = Field(
        None, description="Ranks that share each expert; absent: tensor_model_parallel_size."
    )
    context_parallel_size: Positive = Field(
        1, description="Ranks that share a sequence: each has a part of its positions."
    )
    sequence_parallel: bool = Field(False, description="Share activations over tensor ranks.")
    use_distributed_optimizer: bool = Field(False, description="Optimizer states are shared out over data ranks.")
    bf16: bool = Field(False, description="Weights and activations in bfloat16, fp32 master weights.")
    recompute_activations: bool = Field(False, description="Recompute attention in the backward pass.")
    attention_dropout: NoDropout = Field(0.0, description="Must be 0.")
    hidden_dropout: NoDropout = Field(0.0, description="Must be 0.")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="What updates the weights.")
    lr: Rate = Field(1e-6, description="Highest learning rate.")
    min_lr: Rate = Field(0.0, description="Lowest learning rate.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="How it falls."
    )
    lr_decay_iters: Positive | None = Field(None, description="Optimizer steps of the decay; absent: all.")
    lr_warmup_iters: NonNegative = Field(0, description="Optimizer steps of the warm-up.")
    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="The same as a share of the decay's steps."
    )
    init_lr: Rate = Field(0.0, description="Learning rate at the start of the warm-up.")
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = Field(
        None, description="How a WSD schedule falls at its end."
    )
    wsd_decay_steps: Positive | None = Field(None, description="Optimizer steps of that end.")
    weight_decay: Rate = Field(0.01, description="Decoupled weight decay.")
    start_wd: Rate | None = Field(None, description="Weight decay at the start; absent: weight_decay.")
    end_wd: Rate | None = Field(None, description="Weight decay at the end; absent: weight_decay.")
    wd_incr_style: Literal["constant", "linear", "cosine"] = Field("constant", description="How it goes between them.")
    wd_incr_steps: Positive | None = Field(None, description="Optimizer steps between them; absent: all.")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="Decay of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="Decay of the second moment.")
    adam_eps: Annotated[float, Field(gt=0, le=1)] = Field(1e-8, description="Adam's epsilon.")
    clip_grad: Annotated[float, Field(ge=0, le=1e9)] = Field(1.0, description="Largest gradient norm; 0: no clipping.")
    grad_reduce_in_fp32: bool = Field(True, description="Gradients are summed over data ranks in float32.")
    check_for_nan_in_grad: bool = Field(True, description="A gradient that is not a number ends the run.")

    @field_validator(*RESERVED, mode="before")
    @classmethod
    def _not_headraces_own(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        raise ValueError(f"{info.field_name} cannot be set by a job: {RESERVED[info.field_name]}: leave it out")

    @model_validator(mode="after")
    def _optimizer(self) -> Self:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "recompute_activations means recompute_granularity selective, which is set to full: leave one out",
                field="recompute_granularity",
            )
        if self.optimizer != "adam" and self.use_distributed_optimizer:
            raise ConfigError(
                f"optimizer {self.optimizer} with use_distributed_optimizer: Megatron-core distributes only Adam: "
                "leave one of them out",
                field="optimizer",
            )
        return self

    @model_validator(mode="after")
    def _schedules(self) -> Self:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ConfigError(
                f"lr_warmup_iters {self.lr_warmup_iters} and lr_warmup_fraction {self.lr_warmup_fraction:g} set the "
                "same thing: leave one out",
                field="lr_warmup_fraction",
            )
        start, end = (self.weight_decay if wd is None else wd for wd in (self.start_wd, self.end_wd))
        if start != end and self.wd_incr_style == "constant":
            raise ConfigError(
                f"start_wd {start} and end_wd {end} differ, and wd_incr_style is constant: make it linear or cosine",
                field="wd_incr_style",
            )
        if self.wd_incr_steps is not None and self.wd_incr_style == "constant":
            raise ConfigError(
                "wd_incr_steps has no effect with wd_incr_style constant: leave it out", field="wd_incr_steps"
            )
        for name, value in (("wsd_decay_steps", self.wsd_decay_steps), ("lr_wsd_decay_style", self.lr_wsd_decay_style)):
            if (value is None) == (self.lr_decay_style == "WSD"):
                raise ConfigError(
                    f"lr_decay_style is {self.lr_decay_style} and {name} is {value}: set both or neither", field=name
                )
        return self

    def given(self, names: frozenset[str]) -> dict[str, Any]:
        """The values of those `names` that the job sets."""
        return {name: getattr(self, name) for name in sorted(names & self.model_fields_set)}

    @property
    def dtype(self) -> str:
        """Of the weights, in the trainer and as they are published."""
        return "bfloat16" if self.bf16 else "float32"

    def needs_gpu(self) -> list[str]:
        """The flags that need a GPU, as they would be typed."""
        flags = []
        for name, value in self.given(GPU_ONLY).items():
            if value:
                flag = f"--{name.replace('_', '-')}"
                flags.append(flag if value is True else f"{flag} {value}")
        return flags


DESCRIBED = frozenset(ArchitectureArgs.__annotations__) | frozenset(MegatronArgs.__annotations__)
"""Arguments that headrace says something about; the others are Megatron-core's alone."""


def megatron(arguments: Mapping[str, Any]) -> MegatronArgs:
    return MegatronArgs.model_validate(arguments)
