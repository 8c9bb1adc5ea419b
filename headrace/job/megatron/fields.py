"""Every field of Megatron-core's configs. Written by tools/megatron_fields.py; never edited.

None means that nobody set it: Megatron's own default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from headrace.job.schema.parts.literal import FromJson
from headrace.job.schema.section import Section

VERSIONS = ("0.16", "0.19")
"""The minor versions that these fields are from."""

ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "moe_extended_tp": ("0.16",),
    "async_tensor_model_parallel_allreduce": ("0.16",),
    "moe_use_legacy_grouped_gemm": ("0.16",),
    "muon_use_nesterov": ("0.16",),
    "preserve_fp32_weights": ("0.16",),
    "tensor_parallel_num_weight_shards": ("0.19",),
    "gtp_weight_remat_size": ("0.19",),
    "expert_tensor_parallel_num_weight_shards": ("0.19",),
    "expert_gtp_weight_remat_size": ("0.19",),
    "moe_grad_scale_func": ("0.19",),
    "mtp_grad_scale_func": ("0.19",),
    "overlap_dispatch_backward_with_experts_wgrad": ("0.19",),
    "cpu_offloading_retain_pinned_cpu_buffers": ("0.19",),
    "mtp_use_repeated_layer": ("0.19",),
    "mtp_detach_heads": ("0.19",),
    "mtp_hybrid_override_pattern": ("0.19",),
    "flash_attention_version": ("0.19",),
    "experimental_attention_variant_loss_scale_func": ("0.19",),
    "dsa_indexer_topk_freq": ("0.19",),
    "dsa_indexer_skip_topk_offset": ("0.19",),
    "dsa_kernel_backend": ("0.19",),
    "dsa_indexer_rope_interleaved": ("0.19",),
    "dsa_indexer_rotate_activation": ("0.19",),
    "dsa_indexer_scoring_relu": ("0.19",),
    "dsa_indexer_k_norm_epsilon": ("0.19",),
    "dsa_indexer_k_norm_fp32": ("0.19",),
    "use_mup": ("0.19",),
    "mup_width_mult": ("0.19",),
    "mup_base_hidden_size": ("0.19",),
    "mup_embedding_mult": ("0.19",),
    "mup_output_mult": ("0.19",),
    "mup_base_head_dim": ("0.19",),
    "mup_attn_scale_power": ("0.19",),
    "fused_residual_rmsnorm": ("0.19",),
    "use_transformer_engine_op_fuser": ("0.19",),
    "fp8_output_proj": ("0.19",),
    "high_priority_a2a_comm_stream": ("0.19",),
    "use_grouped_gemm_for_shared_expert": ("0.19",),
    "moe_shared_expert_glu_interleave_size": ("0.19",),
    "moe_router_quantile_balancing_ema": ("0.19",),
    "moe_router_force_biased": ("0.19",),
    "use_grouped_gemm_for_dense_mlp": ("0.19",),
    "moe_single_grouped_weight": ("0.19",),
    "moe_single_grouped_bias": ("0.19",),
    "moe_permute_fusion_into_hybridep": ("0.19",),
    "moe_hybridep_pad_uneven_dispatch_inputs": ("0.19",),
    "moe_pad_experts_for_cuda_graph_inference": ("0.19",),
    "moe_flex_dispatcher_num_sms": ("0.19",),
    "moe_hybridep_num_blocks_permute": ("0.19",),
    "moe_hybridep_num_blocks_unpermute": ("0.19",),
    "moe_hybridep_num_sms_preprocessing": ("0.19",),
    "moe_ncclep_static_shape": ("0.19",),
    "moe_ncclep_zero_copy": ("0.19",),
    "moe_mlp_glu_interleave_size": ("0.19",),
    "moe_expert_rank_capacity_factor": ("0.19",),
    "cuda_graph_modules": ("0.19",),
    "inference_cuda_graph_scope": ("0.19",),
    "nccl_all_reduce_for_prefill": ("0.19",),
    "inference_disable_triton_nvls_kernels": ("0.19",),
    "inference_grouped_gemm_backend": ("0.19",),
    "inference_moe_disable_fused_quant_kernels": ("0.19",),
    "inference_moe_token_dispatcher_type": ("0.19",),
    "mamba_training_ssm_states_dtype": ("0.19",),
    "mlp_chunks_for_training": ("0.19",),
    "delay_offload_until_cuda_graph": ("0.19",),
    "delta_offload_bytes_across_pp_ranks": ("0.19",),
    "activation_offload_fraction": ("0.19",),
    "moe_paged_stash": ("0.19",),
    "moe_paged_stash_page_size": ("0.19",),
    "moe_paged_stash_buffer_size_factor_cuda": ("0.19",),
    "moe_paged_stash_buffer_size_factor_cpu": ("0.19",),
    "fine_grained_offloading_max_inflight_offloads": ("0.19",),
    "mla_down_proj_fusion": ("0.19",),
    "muon_nesterov": ("0.19",),
    "muon_coefficient_type": ("0.19",),
    "muon_scalar_optimizer": ("0.19",),
    "lion_beta1": ("0.19",),
    "lion_beta2": ("0.19",),
    "soap_shampoo_beta": ("0.19",),
    "soap_precondition_frequency": ("0.19",),
    "soap_use_kl_shampoo": ("0.19",),
    "adaptive_muon_moment2_method": ("0.19",),
    "adaptive_muon_beta2": ("0.19",),
    "adaptive_muon_eps": ("0.19",),
    "use_layer_wise_distributed_optimizer": ("0.19",),
    "grad_norm_skip_threshold": ("0.19",),
    "optimizer_cuda_graph": ("0.19",),
    "num_buckets": ("0.19",),
    "param_name_patterns_for_fp32_local_accumulation": ("0.19",),
    "fp4_param_gather": ("0.19",),
    "fsdp_db_use_persist_buf_on_alloc_fail": ("0.19",),
    "fsdp_all_gather_in_start_param_sync": ("0.19",),
    "megatron_fsdp_main_params_dtype": ("0.19",),
    "megatron_fsdp_main_grads_dtype": ("0.19",),
    "megatron_fsdp_grad_comm_dtype": ("0.19",),
    "megatron_fsdp_use_decoupled_grad": ("0.19",),
    "megatron_fsdp_cuda_graph_mode": ("0.19",),
    "megatron_fsdp_enable_fine_grained_param_gather": ("0.19",),
    "megatron_fsdp_max_pool_double_buffer": ("0.19",),
}
"""Fields that not all of them have."""

OBJECTS: frozenset[str] = frozenset(
    [
        "activation_func",
        "embedding_init_method",
        "experimental_attention_variant_loss_scale_func",
        "finalize_model_grads_func",
        "grad_scale_func",
        "grad_sync_func",
        "inference_cuda_graph_scope",
        "init_method",
        "moe_grad_scale_func",
        "mtp_grad_scale_func",
        "no_sync_func",
        "output_layer_init_method",
        "param_sync_func",
        "quant_recipe",
        "timers",
    ]
)
"""Fields that are Python objects, so that no flag can give them."""


class MegatronFields(Section):
    tensor_model_parallel_size: int | None = Field(None, description="TransformerConfig: 1.")
    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = Field(
        None, description="TransformerConfig: none."
    )
    pipeline_model_parallel_size: int | None = Field(None, description="TransformerConfig: 1.")
    virtual_pipeline_model_parallel_size: int | None = Field(None, description="TransformerConfig: none.")
    sequence_parallel: bool | None = Field(None, description="TransformerConfig: off.")
    context_parallel_size: int | None = Field(None, description="TransformerConfig: 1.")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = Field(None, description="TransformerConfig: none.")
    max_seqlen_per_dp_cp_rank: int | None = Field(None, description="TransformerConfig: none.")
    hybrid_context_parallel: bool | None = Field(None, description="TransformerConfig: off.")
    expert_model_parallel_size: int | None = Field(None, description="TransformerConfig: 1.")
    expert_tensor_parallel_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_extended_tp: bool | None = Field(None, description="TransformerConfig: off.")
    perform_initialization: bool | None = Field(None, description="TransformerConfig: on.")
    use_cpu_initialization: bool | None = Field(None, description="TransformerConfig: off.")
    fp16: bool | None = Field(None, description="TransformerConfig; OptimizerConfig: off.")
    bf16: bool | None = Field(None, description="TransformerConfig; OptimizerConfig: off.")
    params_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="TransformerConfig; OptimizerConfig: torch.float32."
    )
    timers: str | None = Field(None, description="TransformerConfig; OptimizerConfig: none.")
    finalize_model_grads_func: str | None = Field(None, description="TransformerConfig: none.")
    grad_scale_func: str | None = Field(None, description="TransformerConfig: none.")
    no_sync_func: str | None = Field(None, description="TransformerConfig: none.")
    grad_sync_func: str | None = Field(None, description="TransformerConfig: none.")
    param_sync_func: str | None = Field(None, description="TransformerConfig: none.")
    deterministic_mode: bool | None = Field(None, description="TransformerConfig: off.")
    enable_autocast: bool | None = Field(None, description="TransformerConfig: off.")
    autocast_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="TransformerConfig: none."
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = Field(
        None, description="TransformerConfig: none."
    )
    gradient_accumulation_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    async_tensor_model_parallel_allreduce: bool | None = Field(None, description="TransformerConfig: on.")
    use_te_rng_tracker: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_overlap: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_bulk_wgrad: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_bulk_dgrad: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_overlap_ag: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_overlap_rs: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_overlap_rs_dgrad: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_split_ag: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_atomic_ag: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_split_rs: bool | None = Field(None, description="TransformerConfig: on.")
    tp_comm_atomic_rs: bool | None = Field(None, description="TransformerConfig: off.")
    cross_entropy_loss_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    cross_entropy_fusion_impl: Literal["native", "te"] | None = Field(None, description="TransformerConfig: native.")
    tp_comm_overlap_disable_qkv: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_overlap_disable_fc1: bool | None = Field(None, description="TransformerConfig: off.")
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] | None = Field(
        None, description="TransformerConfig: nccl."
    )
    overlap_moe_expert_parallel_comm: bool | None = Field(None, description="TransformerConfig: off.")
    delay_wgrad_compute: bool | None = Field(None, description="TransformerConfig; DistributedDataParallelConfig: off.")
    ep_overlap_early_attn_memory_release: bool | None = Field(None, description="TransformerConfig: off.")
    pipeline_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="TransformerConfig: none."
    )
    variable_seq_lengths: bool | None = Field(None, description="TransformerConfig: off.")
    overlap_p2p_comm: bool | None = Field(None, description="TransformerConfig: off.")
    batch_p2p_comm: bool | None = Field(None, description="TransformerConfig: on.")
    batch_p2p_sync: bool | None = Field(None, description="TransformerConfig: on.")
    use_ring_exchange_p2p: bool | None = Field(None, description="TransformerConfig: off.")
    deallocate_pipeline_outputs: bool | None = Field(None, description="TransformerConfig: off.")
    defer_embedding_wgrad_compute: bool | None = Field(None, description="TransformerConfig: off.")
    wgrad_deferral_limit: int | None = Field(None, description="TransformerConfig: 0.")
    overlap_p2p_comm_warmup_flush: bool | None = Field(None, description="TransformerConfig: off.")
    microbatch_group_size_per_vp_stage: int | None = Field(None, description="TransformerConfig: none.")
    mtp_standalone: bool | None = Field(None, description="TransformerConfig: off.")
    cpu_offloading: bool | None = Field(None, description="TransformerConfig: off.")
    cpu_offloading_num_layers: int | None = Field(None, description="TransformerConfig: 0.")
    cpu_offloading_activations: bool | None = Field(None, description="TransformerConfig: on.")
    cpu_offloading_weights: bool | None = Field(None, description="TransformerConfig: off.")
    cpu_offloading_double_buffering: bool | None = Field(None, description="TransformerConfig: off.")
    barrier_with_L1_time: bool | None = Field(None, description="TransformerConfig; OptimizerConfig: on.")
    num_layers: int | None = Field(None, description="TransformerConfig: 0.")
    mtp_num_layers: int | None = Field(None, description="TransformerConfig: none.")
    mtp_loss_scaling_factor: float | None = Field(None, description="TransformerConfig: 0.1.")
    num_layers_in_first_pipeline_stage: int | None = Field(None, description="TransformerConfig: none.")
    num_layers_in_last_pipeline_stage: int | None = Field(None, description="TransformerConfig: none.")
    pipeline_model_parallel_layout: Annotated[str | tuple[str, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    account_for_embedding_in_pipeline_split: bool | None = Field(None, description="TransformerConfig: off.")
    account_for_loss_in_pipeline_split: bool | None = Field(None, description="TransformerConfig: off.")
    hidden_size: int | None = Field(None, description="TransformerConfig: 0.")
    num_attention_heads: int | None = Field(None, description="TransformerConfig: 0.")
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = Field(
        None, description="TransformerConfig: AttnBackend.auto."
    )
    softmax_scale: float | None = Field(None, description="TransformerConfig: none.")
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] | None = Field(
        None, description="TransformerConfig: vanilla."
    )
    num_query_groups: int | None = Field(None, description="TransformerConfig: none.")
    ffn_hidden_size: int | None = Field(None, description="TransformerConfig: none.")
    kv_channels: int | None = Field(None, description="TransformerConfig: none.")
    hidden_dropout: float | None = Field(None, description="TransformerConfig: 0.1.")
    attention_dropout: float | None = Field(None, description="TransformerConfig: 0.1.")
    fp32_residual_connection: bool | None = Field(None, description="TransformerConfig: off.")
    apply_residual_connection_post_layernorm: bool | None = Field(None, description="TransformerConfig: off.")
    layernorm_epsilon: float | None = Field(None, description="TransformerConfig: 1e-05.")
    layernorm_zero_centered_gamma: bool | None = Field(None, description="TransformerConfig: off.")
    add_bias_linear: bool | None = Field(None, description="TransformerConfig: on.")
    add_qkv_bias: bool | None = Field(None, description="TransformerConfig: off.")
    gated_linear_unit: bool | None = Field(None, description="TransformerConfig: off.")
    activation_func: str | None = Field(None, description="TransformerConfig: F.gelu.")
    activation_func_fp8_input_store: bool | None = Field(None, description="TransformerConfig: off.")
    glu_linear_offset: float | None = Field(None, description="TransformerConfig: 0.0.")
    activation_func_clamp_value: float | None = Field(None, description="TransformerConfig: none.")
    num_moe_experts: int | None = Field(None, description="TransformerConfig: none.")
    rotary_interleaved: bool | None = Field(None, description="TransformerConfig: off.")
    window_size: tuple[int, ...] | None = Field(None, description="TransformerConfig: none.")
    window_attn_skip_freq: Annotated[int | tuple[int, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] | None = Field(
        None, description="TransformerConfig; MLATransformerConfig: LayerNorm."
    )
    qk_layernorm: bool | None = Field(None, description="TransformerConfig: off.")
    qk_l2_norm: bool | None = Field(None, description="TransformerConfig: off.")
    qk_clip: bool | None = Field(None, description="TransformerConfig: off.")
    qk_clip_alpha: float | None = Field(None, description="TransformerConfig: 0.5.")
    qk_clip_threshold: float | None = Field(None, description="TransformerConfig: 100.")
    log_max_attention_logit: bool | None = Field(None, description="TransformerConfig: off.")
    attention_output_gate: bool | None = Field(None, description="TransformerConfig: off.")
    test_mode: bool | None = Field(None, description="TransformerConfig: off.")
    calculate_per_token_loss: bool | None = Field(None, description="TransformerConfig: off.")
    multi_latent_attention: bool | None = Field(None, description="TransformerConfig; MLATransformerConfig: off.")
    no_rope_freq: Annotated[int | tuple[int, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    experimental_attention_variant: Literal["gated_delta_net", "dsa"] | None = Field(
        None, description="TransformerConfig: none."
    )
    dsa_indexer_n_heads: int | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_head_dim: int | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_topk: int | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_loss_coeff: float | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_use_sparse_loss: bool | None = Field(None, description="TransformerConfig: off.")
    linear_attention_freq: Annotated[int | tuple[int, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    linear_conv_kernel_dim: int | None = Field(None, description="TransformerConfig: 4.")
    linear_key_head_dim: int | None = Field(None, description="TransformerConfig: 128.")
    linear_value_head_dim: int | None = Field(None, description="TransformerConfig: 128.")
    linear_num_key_heads: int | None = Field(None, description="TransformerConfig: 16.")
    linear_num_value_heads: int | None = Field(None, description="TransformerConfig: 32.")
    init_method: str | None = Field(None, description="TransformerConfig: none.")
    output_layer_init_method: str | None = Field(None, description="TransformerConfig: none.")
    init_method_std: float | None = Field(None, description="TransformerConfig: 0.02.")
    embedding_init_method: str | None = Field(None, description="TransformerConfig: none.")
    embedding_init_method_std: float | None = Field(None, description="TransformerConfig: none.")
    init_model_with_meta_device: bool | None = Field(None, description="TransformerConfig: off.")
    apply_query_key_layer_scaling: bool | None = Field(None, description="TransformerConfig: off.")
    attention_softmax_in_fp32: bool | None = Field(None, description="TransformerConfig: on.")
    disable_bf16_reduced_precision_matmul: bool | None = Field(None, description="TransformerConfig: off.")
    bias_activation_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    masked_softmax_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    persist_layer_norm: bool | None = Field(None, description="TransformerConfig: off.")
    memory_efficient_layer_norm: bool | None = Field(None, description="TransformerConfig: off.")
    bias_dropout_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    apply_rope_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    use_fused_weighted_squared_relu: bool | None = Field(None, description="TransformerConfig: off.")
    fused_single_qkv_rope: bool | None = Field(None, description="TransformerConfig: off.")
    recompute_granularity: Literal["full", "selective"] | None = Field(None, description="TransformerConfig: none.")
    recompute_method: Literal["uniform", "block"] | None = Field(None, description="TransformerConfig: none.")
    recompute_num_layers: int | None = Field(None, description="TransformerConfig: none.")
    distribute_saved_activations: bool | None = Field(None, description="TransformerConfig: off.")
    recompute_modules: tuple[str, ...] | None = Field(None, description="TransformerConfig: none.")
    fp8: Literal["e4m3", "hybrid"] | None = Field(None, description="TransformerConfig: none.")
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] | None = Field(
        None, description="TransformerConfig; OptimizerConfig: delayed."
    )
    fp8_param: bool | None = Field(None, description="TransformerConfig: off.")
    fp8_quantizer_factory: str | None = Field(None, description="TransformerConfig: none.")
    fp8_margin: int | None = Field(None, description="TransformerConfig: 0.")
    fp8_interval: int | None = Field(None, description="TransformerConfig: 1.")
    fp8_amax_history_len: int | None = Field(None, description="TransformerConfig: 1.")
    fp8_amax_compute_algo: Literal["most_recent", "max"] | None = Field(
        None, description="TransformerConfig: most_recent."
    )
    fp8_wgrad: bool | None = Field(None, description="TransformerConfig: on.")
    fp8_dot_product_attention: bool | None = Field(None, description="TransformerConfig: off.")
    fp8_multi_head_attention: bool | None = Field(None, description="TransformerConfig: off.")
    tp_only_amax_red: bool | None = Field(None, description="TransformerConfig: off.")
    first_last_layers_bf16: bool | None = Field(None, description="TransformerConfig: off.")
    num_layers_at_start_in_bf16: int | None = Field(None, description="TransformerConfig: 1.")
    num_layers_at_end_in_bf16: int | None = Field(None, description="TransformerConfig: 1.")
    use_kitchen: bool | None = Field(None, description="TransformerConfig: off.")
    use_kitchen_attention: bool | None = Field(None, description="TransformerConfig: off.")
    kitchen_attention_backend: Literal["sdpa", "fa"] | None = Field(None, description="TransformerConfig: sdpa.")
    fp4: Literal["e2m1"] | None = Field(None, description="TransformerConfig: none.")
    fp4_recipe: Literal["nvfp4", "custom"] | None = Field(None, description="TransformerConfig: nvfp4.")
    fp4_param: bool | None = Field(None, description="TransformerConfig: off.")
    fp4_quantizer_factory: str | None = Field(None, description="TransformerConfig: none.")
    moe_shared_expert_intermediate_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_shared_expert_gate: bool | None = Field(None, description="TransformerConfig: off.")
    moe_shared_expert_overlap: bool | None = Field(None, description="TransformerConfig: off.")
    moe_layer_freq: Annotated[int | tuple[int, ...], FromJson] | None = Field(None, description="TransformerConfig: 1.")
    moe_ffn_hidden_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_router_load_balancing_type: Annotated[str | tuple[str, ...], FromJson] | None = Field(
        None, description="TransformerConfig: aux_loss."
    )
    moe_router_topk: int | None = Field(None, description="TransformerConfig: 2.")
    moe_enable_routing_replay: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_topk_limited_devices: int | None = Field(None, description="TransformerConfig: none.")
    moe_router_padding_for_quantization: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_padding_for_fp8: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_num_groups: int | None = Field(None, description="TransformerConfig: none.")
    moe_router_group_topk: int | None = Field(None, description="TransformerConfig: none.")
    moe_router_pre_softmax: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_topk_scaling_factor: float | None = Field(None, description="TransformerConfig: none.")
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] | None = Field(
        None, description="TransformerConfig: softmax."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(None, description="TransformerConfig: none.")
    moe_router_enable_expert_bias: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_bias_update_rate: float | None = Field(None, description="TransformerConfig: 0.001.")
    moe_router_force_load_balancing: bool | None = Field(None, description="TransformerConfig: off.")
    moe_grouped_gemm: bool | None = Field(None, description="TransformerConfig: off.")
    moe_use_legacy_grouped_gemm: bool | None = Field(None, description="TransformerConfig: off.")
    moe_aux_loss_coeff: Annotated[float | tuple[float, ...], FromJson] | None = Field(
        None, description="TransformerConfig: 0.0."
    )
    moe_z_loss_coeff: float | None = Field(None, description="TransformerConfig: none.")
    moe_input_jitter_eps: float | None = Field(None, description="TransformerConfig: none.")
    moe_token_dropping: bool | None = Field(None, description="TransformerConfig: off.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] | None = Field(
        None, description="TransformerConfig: allgather."
    )
    moe_enable_deepep: bool | None = Field(None, description="TransformerConfig: off.")
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] | None = Field(
        None, description="TransformerConfig: deepep."
    )
    moe_per_layer_logging: bool | None = Field(None, description="TransformerConfig: off.")
    moe_expert_capacity_factor: float | None = Field(None, description="TransformerConfig: none.")
    moe_pad_expert_input_to_capacity: bool | None = Field(None, description="TransformerConfig: off.")
    moe_token_drop_policy: Literal["probs", "position"] | None = Field(None, description="TransformerConfig: probs.")
    moe_layer_recompute: bool | None = Field(None, description="TransformerConfig: off.")
    moe_permute_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    moe_router_fusion: bool | None = Field(None, description="TransformerConfig: off.")
    moe_apply_probs_on_input: bool | None = Field(None, description="TransformerConfig: off.")
    moe_latent_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_deepep_num_sms: int | None = Field(None, description="TransformerConfig: none.")
    moe_hybridep_num_sms: int | None = Field(None, description="TransformerConfig: none.")
    cp_comm_type: Annotated[str | tuple[str, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    enable_cuda_graph: bool | None = Field(None, description="TransformerConfig: off.")
    cuda_graph_use_single_mempool: bool | None = Field(None, description="TransformerConfig: on.")
    cuda_graph_retain_backward_graph: bool | None = Field(None, description="TransformerConfig: off.")
    cuda_graph_warmup_steps: int | None = Field(None, description="TransformerConfig: 3.")
    external_cuda_graph: bool | None = Field(None, description="TransformerConfig: off.")
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] | None = Field(
        None, description="TransformerConfig: none."
    )
    cuda_graph_scope: Annotated[str | tuple[str, ...], FromJson] | None = Field(
        None, description="TransformerConfig: none."
    )
    clone_scatter_output_in_embedding: bool | None = Field(None, description="TransformerConfig: on.")
    disable_parameter_transpose_cache: bool | None = Field(None, description="TransformerConfig: off.")
    config_logger_dir: str | None = Field(None, description="TransformerConfig; OptimizerConfig: .")
    flash_decode: bool | None = Field(None, description="TransformerConfig: off.")
    batch_invariant_mode: bool | None = Field(None, description="TransformerConfig: off.")
    use_te_activation_func: bool | None = Field(None, description="TransformerConfig: off.")
    inference_rng_tracker: bool | None = Field(None, description="TransformerConfig: off.")
    inference_sampling_seed: int | None = Field(None, description="TransformerConfig: 42.")
    symmetric_ar_type: Literal["two_shot", "one_shot", "multimem_all_reduce"] | None = Field(
        None, description="TransformerConfig: none."
    )
    use_inference_optimized_layers: bool | None = Field(None, description="TransformerConfig: off.")
    inference_fuse_tp_communication: bool | None = Field(None, description="TransformerConfig: off.")
    mrope_section: tuple[int, ...] | None = Field(None, description="TransformerConfig: none.")
    is_hybrid_model: bool | None = Field(None, description="TransformerConfig: off.")
    mamba_state_dim: int | None = Field(None, description="TransformerConfig: 128.")
    mamba_head_dim: int | None = Field(None, description="TransformerConfig: 64.")
    mamba_num_groups: int | None = Field(None, description="TransformerConfig: 8.")
    mamba_num_heads: int | None = Field(None, description="TransformerConfig: none.")
    use_mamba_mem_eff_path: bool | None = Field(None, description="TransformerConfig: on.")
    mlp_chunks_for_prefill: int | None = Field(None, description="TransformerConfig: 1.")
    heterogeneous_block_specs: bool | None = Field(None, description="TransformerConfig: off.")
    hetereogenous_dist_checkpoint: bool | None = Field(None, description="TransformerConfig: off.")
    quant_recipe: str | None = Field(None, description="TransformerConfig: none.")
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] | None = Field(
        None, description="TransformerConfig: transformer_engine."
    )
    fine_grained_activation_offloading: bool | None = Field(None, description="TransformerConfig: off.")
    offload_modules: tuple[str, ...] | None = Field(None, description="TransformerConfig: none.")
    min_offloaded_tensor_size: int | None = Field(None, description="TransformerConfig: 1024 * 1024.")
    q_lora_rank: int | None = Field(None, description="MLATransformerConfig: 512.")
    kv_lora_rank: int | None = Field(None, description="MLATransformerConfig: 512.")
    qk_head_dim: int | None = Field(None, description="MLATransformerConfig: 128.")
    qk_pos_emb_head_dim: int | None = Field(None, description="MLATransformerConfig: 64.")
    v_head_dim: int | None = Field(None, description="MLATransformerConfig: 128.")
    rope_type: str | None = Field(None, description="MLATransformerConfig: yarn.")
    rotary_base: float | None = Field(None, description="MLATransformerConfig: 10000.")
    rotary_percent: float | None = Field(None, description="MLATransformerConfig: 1.0.")
    rotary_scaling_factor: float | None = Field(None, description="MLATransformerConfig: 40.")
    original_max_position_embeddings: int | None = Field(None, description="MLATransformerConfig: 4096.")
    beta_fast: float | None = Field(None, description="MLATransformerConfig: 32.")
    beta_slow: float | None = Field(None, description="MLATransformerConfig: 1.")
    mscale: float | None = Field(None, description="MLATransformerConfig: 1.0.")
    mscale_all_dim: float | None = Field(None, description="MLATransformerConfig: 0.0.")
    cache_mla_latents: bool | None = Field(None, description="MLATransformerConfig: off.")
    lr: float | None = Field(None, description="OptimizerConfig: none.")
    min_lr: float | None = Field(None, description="OptimizerConfig; OptimizerParamScheduler: none.")
    decoupled_lr: float | None = Field(None, description="OptimizerConfig: none.")
    decoupled_min_lr: float | None = Field(None, description="OptimizerConfig: none.")
    weight_decay: float | None = Field(None, description="OptimizerConfig: 0.01.")
    apply_wd_to_qk_layernorm: bool | None = Field(None, description="OptimizerConfig: off.")
    reuse_grad_buf_for_mxfp8_param_ag: bool | None = Field(
        None, description="OptimizerConfig; DistributedDataParallelConfig: off."
    )
    use_precision_aware_optimizer: bool | None = Field(None, description="OptimizerConfig: off.")
    store_param_remainders: bool | None = Field(None, description="OptimizerConfig: on.")
    main_grads_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="OptimizerConfig: torch.float32."
    )
    main_params_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="OptimizerConfig: torch.float32."
    )
    exp_avg_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="OptimizerConfig: torch.float32."
    )
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="OptimizerConfig: torch.float32."
    )
    optimizer: str | None = Field(None, description="OptimizerConfig: adam.")
    loss_scale: float | None = Field(None, description="OptimizerConfig: none.")
    initial_loss_scale: float | None = Field(None, description="OptimizerConfig: 2 ** 32.")
    min_loss_scale: float | None = Field(None, description="OptimizerConfig: 1.0.")
    loss_scale_window: float | None = Field(None, description="OptimizerConfig: 1000.")
    hysteresis: int | None = Field(None, description="OptimizerConfig: 2.")
    adam_beta1: float | None = Field(None, description="OptimizerConfig: 0.9.")
    adam_beta2: float | None = Field(None, description="OptimizerConfig: 0.999.")
    adam_eps: float | None = Field(None, description="OptimizerConfig: 1e-08.")
    decoupled_weight_decay: bool | None = Field(None, description="OptimizerConfig: on.")
    sgd_momentum: float | None = Field(None, description="OptimizerConfig: 0.9.")
    muon_momentum: float | None = Field(None, description="OptimizerConfig: 0.95.")
    muon_split_qkv: bool | None = Field(None, description="OptimizerConfig: on.")
    muon_use_nesterov: bool | None = Field(None, description="OptimizerConfig: off.")
    muon_scale_mode: str | None = Field(None, description="OptimizerConfig: spectral.")
    muon_fp32_matmul_prec: str | None = Field(None, description="OptimizerConfig: medium.")
    muon_num_ns_steps: int | None = Field(None, description="OptimizerConfig: 5.")
    muon_tp_mode: str | None = Field(None, description="OptimizerConfig: blockwise.")
    muon_extra_scale_factor: float | None = Field(None, description="OptimizerConfig: 1.0.")
    use_distributed_optimizer: bool | None = Field(
        None, description="OptimizerConfig; DistributedDataParallelConfig: off."
    )
    overlap_param_gather: bool | None = Field(None, description="OptimizerConfig; DistributedDataParallelConfig: off.")
    overlap_param_gather_with_optimizer_step: bool | None = Field(None, description="OptimizerConfig: off.")
    optimizer_cpu_offload: bool | None = Field(None, description="OptimizerConfig: off.")
    optimizer_offload_fraction: float | None = Field(None, description="OptimizerConfig: 0.0.")
    use_torch_optimizer_for_cpu_offload: bool | None = Field(None, description="OptimizerConfig: off.")
    overlap_cpu_optimizer_d2h_h2d: bool | None = Field(None, description="OptimizerConfig: off.")
    pin_cpu_grads: bool | None = Field(None, description="OptimizerConfig: on.")
    pin_cpu_params: bool | None = Field(None, description="OptimizerConfig: on.")
    clip_grad: float | None = Field(None, description="OptimizerConfig: 1.0.")
    log_num_zeros_in_grad: bool | None = Field(None, description="OptimizerConfig: off.")
    grad_reduce_in_fp32: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    overlap_grad_reduce: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    align_param_gather: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    num_distributed_optimizer_instances: int | None = Field(None, description="DistributedDataParallelConfig: 1.")
    check_for_nan_in_grad: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    check_for_large_grads: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    bucket_size: int | None = Field(None, description="DistributedDataParallelConfig: none.")
    pad_buckets_for_high_nccl_busbw: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    reduce_scatter_with_fp32_accumulation: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    average_in_collective: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    fp8_param_gather: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    use_megatron_fsdp: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    use_custom_fsdp: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    data_parallel_sharding_strategy: str | None = Field(None, description="DistributedDataParallelConfig: no_shard.")
    gradient_reduce_div_fusion: bool | None = Field(None, description="DistributedDataParallelConfig: on.")
    suggested_communication_unit_size: int | None = Field(None, description="DistributedDataParallelConfig: none.")
    preserve_fp32_weights: bool | None = Field(None, description="DistributedDataParallelConfig: on.")
    keep_fp8_transpose_cache: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    nccl_ub: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    fsdp_double_buffer: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    outer_dp_sharding_strategy: str | None = Field(None, description="DistributedDataParallelConfig: no_shard.")
    disable_symmetric_registration: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    fsdp_manual_registration: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    init_lr: float | None = Field(None, description="OptimizerParamScheduler: none.")
    max_lr: float | None = Field(None, description="OptimizerParamScheduler: none.")
    lr_warmup_steps: int | None = Field(None, description="OptimizerParamScheduler: none.")
    lr_decay_steps: int | None = Field(None, description="OptimizerParamScheduler: none.")
    lr_decay_style: str | None = Field(None, description="OptimizerParamScheduler: none.")
    start_wd: float | None = Field(None, description="OptimizerParamScheduler: none.")
    end_wd: float | None = Field(None, description="OptimizerParamScheduler: none.")
    wd_incr_steps: int | None = Field(None, description="OptimizerParamScheduler: none.")
    wd_incr_style: str | None = Field(None, description="OptimizerParamScheduler: none.")
    use_checkpoint_opt_param_scheduler: bool | None = Field(None, description="OptimizerParamScheduler: none.")
    override_opt_param_scheduler: bool | None = Field(None, description="OptimizerParamScheduler: none.")
    wsd_decay_steps: int | None = Field(None, description="OptimizerParamScheduler: none.")
    lr_wsd_decay_style: str | None = Field(None, description="OptimizerParamScheduler: none.")
    tensor_parallel_num_weight_shards: int | None = Field(None, description="TransformerConfig: none.")
    gtp_weight_remat_size: int | None = Field(None, description="TransformerConfig: 1.")
    expert_tensor_parallel_num_weight_shards: int | None = Field(None, description="TransformerConfig: none.")
    expert_gtp_weight_remat_size: int | None = Field(None, description="TransformerConfig: 1.")
    moe_grad_scale_func: str | None = Field(None, description="TransformerConfig: none.")
    mtp_grad_scale_func: str | None = Field(None, description="TransformerConfig: none.")
    overlap_dispatch_backward_with_experts_wgrad: bool | None = Field(None, description="TransformerConfig: off.")
    cpu_offloading_retain_pinned_cpu_buffers: bool | None = Field(None, description="TransformerConfig: off.")
    mtp_use_repeated_layer: bool | None = Field(None, description="TransformerConfig: off.")
    mtp_detach_heads: bool | None = Field(None, description="TransformerConfig: off.")
    mtp_hybrid_override_pattern: str | None = Field(None, description="TransformerConfig: none.")
    flash_attention_version: Literal[2, 3, 4] | None = Field(None, description="TransformerConfig: none.")
    experimental_attention_variant_loss_scale_func: str | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_topk_freq: int | None = Field(None, description="TransformerConfig: 1.")
    dsa_indexer_skip_topk_offset: int | None = Field(None, description="TransformerConfig: 0.")
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] | None = Field(
        None, description="TransformerConfig: none."
    )
    dsa_indexer_rope_interleaved: bool | None = Field(None, description="TransformerConfig: off.")
    dsa_indexer_rotate_activation: bool | None = Field(None, description="TransformerConfig: on.")
    dsa_indexer_scoring_relu: bool | None = Field(None, description="TransformerConfig: on.")
    dsa_indexer_k_norm_epsilon: float | None = Field(None, description="TransformerConfig: none.")
    dsa_indexer_k_norm_fp32: bool | None = Field(None, description="TransformerConfig: off.")
    use_mup: bool | None = Field(None, description="TransformerConfig: off.")
    mup_width_mult: float | None = Field(None, description="TransformerConfig: 1.0.")
    mup_base_hidden_size: int | None = Field(None, description="TransformerConfig: none.")
    mup_embedding_mult: float | None = Field(None, description="TransformerConfig: 1.0.")
    mup_output_mult: float | None = Field(None, description="TransformerConfig: 1.0.")
    mup_base_head_dim: float | None = Field(None, description="TransformerConfig: none.")
    mup_attn_scale_power: float | None = Field(None, description="TransformerConfig: 1.0.")
    fused_residual_rmsnorm: bool | None = Field(None, description="TransformerConfig: off.")
    use_transformer_engine_op_fuser: bool | None = Field(None, description="TransformerConfig: off.")
    fp8_output_proj: bool | None = Field(None, description="TransformerConfig: off.")
    high_priority_a2a_comm_stream: bool | None = Field(None, description="TransformerConfig: off.")
    use_grouped_gemm_for_shared_expert: bool | None = Field(None, description="TransformerConfig: off.")
    moe_shared_expert_glu_interleave_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_router_quantile_balancing_ema: float | None = Field(None, description="TransformerConfig: 0.0.")
    moe_router_force_biased: float | None = Field(None, description="TransformerConfig: none.")
    use_grouped_gemm_for_dense_mlp: bool | None = Field(None, description="TransformerConfig: off.")
    moe_single_grouped_weight: bool | None = Field(None, description="TransformerConfig: off.")
    moe_single_grouped_bias: bool | None = Field(None, description="TransformerConfig: off.")
    moe_permute_fusion_into_hybridep: bool | None = Field(None, description="TransformerConfig: off.")
    moe_hybridep_pad_uneven_dispatch_inputs: bool | None = Field(None, description="TransformerConfig: off.")
    moe_pad_experts_for_cuda_graph_inference: bool | None = Field(None, description="TransformerConfig: off.")
    moe_flex_dispatcher_num_sms: int | None = Field(None, description="TransformerConfig: none.")
    moe_hybridep_num_blocks_permute: int | None = Field(None, description="TransformerConfig: none.")
    moe_hybridep_num_blocks_unpermute: int | None = Field(None, description="TransformerConfig: none.")
    moe_hybridep_num_sms_preprocessing: int | None = Field(None, description="TransformerConfig: 108.")
    moe_ncclep_static_shape: bool | None = Field(None, description="TransformerConfig: off.")
    moe_ncclep_zero_copy: bool | None = Field(None, description="TransformerConfig: off.")
    moe_mlp_glu_interleave_size: int | None = Field(None, description="TransformerConfig: none.")
    moe_expert_rank_capacity_factor: float | None = Field(None, description="TransformerConfig: none.")
    cuda_graph_modules: Annotated[str | tuple[str, ...], FromJson] | None = Field(
        None, description="TransformerConfig: full."
    )
    inference_cuda_graph_scope: str | None = Field(None, description="TransformerConfig: none.")
    nccl_all_reduce_for_prefill: bool | None = Field(None, description="TransformerConfig: off.")
    inference_disable_triton_nvls_kernels: bool | None = Field(None, description="TransformerConfig: off.")
    inference_grouped_gemm_backend: Literal["flashinfer", "torch", "vllm"] | None = Field(
        None, description="TransformerConfig: vllm."
    )
    inference_moe_disable_fused_quant_kernels: bool | None = Field(None, description="TransformerConfig: off.")
    inference_moe_token_dispatcher_type: Literal["nccl", "nvls"] | None = Field(
        None, description="TransformerConfig: nvls."
    )
    mamba_training_ssm_states_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="TransformerConfig: none."
    )
    mlp_chunks_for_training: int | None = Field(None, description="TransformerConfig: 1.")
    delay_offload_until_cuda_graph: bool | None = Field(None, description="TransformerConfig: off.")
    delta_offload_bytes_across_pp_ranks: int | None = Field(None, description="TransformerConfig: 0.")
    activation_offload_fraction: float | None = Field(None, description="TransformerConfig: 1.0.")
    moe_paged_stash: bool | None = Field(None, description="TransformerConfig: off.")
    moe_paged_stash_page_size: int | None = Field(None, description="TransformerConfig: 64.")
    moe_paged_stash_buffer_size_factor_cuda: float | None = Field(None, description="TransformerConfig: 1.1.")
    moe_paged_stash_buffer_size_factor_cpu: float | None = Field(None, description="TransformerConfig: 0.0.")
    fine_grained_offloading_max_inflight_offloads: int | None = Field(None, description="TransformerConfig: none.")
    mla_down_proj_fusion: bool | None = Field(None, description="MLATransformerConfig: off.")
    muon_nesterov: bool | None = Field(None, description="OptimizerConfig: off.")
    muon_coefficient_type: str | None = Field(None, description="OptimizerConfig: quintic.")
    muon_scalar_optimizer: str | None = Field(None, description="OptimizerConfig: adam.")
    lion_beta1: float | None = Field(None, description="OptimizerConfig: 0.95.")
    lion_beta2: float | None = Field(None, description="OptimizerConfig: 0.98.")
    soap_shampoo_beta: float | None = Field(None, description="OptimizerConfig: 0.95.")
    soap_precondition_frequency: int | None = Field(None, description="OptimizerConfig: 1.")
    soap_use_kl_shampoo: bool | None = Field(None, description="OptimizerConfig: on.")
    adaptive_muon_moment2_method: str | None = Field(None, description="OptimizerConfig: adamuon.")
    adaptive_muon_beta2: float | None = Field(None, description="OptimizerConfig: 0.95.")
    adaptive_muon_eps: float | None = Field(None, description="OptimizerConfig: 1e-08.")
    use_layer_wise_distributed_optimizer: bool | None = Field(None, description="OptimizerConfig: off.")
    grad_norm_skip_threshold: float | None = Field(None, description="OptimizerConfig: float('inf').")
    optimizer_cuda_graph: bool | None = Field(None, description="OptimizerConfig: off.")
    num_buckets: int | None = Field(None, description="DistributedDataParallelConfig: none.")
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] | None = Field(
        None, description="DistributedDataParallelConfig: ()."
    )
    fp4_param_gather: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    fsdp_db_use_persist_buf_on_alloc_fail: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    fsdp_all_gather_in_start_param_sync: bool | None = Field(None, description="DistributedDataParallelConfig: on.")
    megatron_fsdp_main_params_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="DistributedDataParallelConfig: torch.float32."
    )
    megatron_fsdp_main_grads_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="DistributedDataParallelConfig: none."
    )
    megatron_fsdp_grad_comm_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="DistributedDataParallelConfig: none."
    )
    megatron_fsdp_use_decoupled_grad: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    megatron_fsdp_cuda_graph_mode: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
    megatron_fsdp_enable_fine_grained_param_gather: bool | None = Field(
        None, description="DistributedDataParallelConfig: off."
    )
    megatron_fsdp_max_pool_double_buffer: bool | None = Field(None, description="DistributedDataParallelConfig: off.")
