"""The flags of slime's own scripts (scripts/models/*.sh, scripts/run-*.sh, examples/), with values that they give them.

Facts of the command lines, as data: which option each one sets here, or why it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def layers(dense: int, total: int) -> str:
    """As the scripts write --moe-layer-freq."""
    return f"[{','.join('0' if layer < dense else '1' for layer in range(total))}]"


_DENSE = "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm"
_LATENT = (
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --mscale 1.0 --mscale-all-dim 1.0 "
    "--attention-softmax-in-fp32 --no-rope-fusion"
)
_SIGMOID = (
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0 "
    "--moe-router-bias-update-rate 0 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion"
)
_SOFTMAX = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --normalization RMSNorm --position-embedding-type "
    "rope --norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights --vocab-size 151936 "
    "--rotary-base 1000000 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 8 --num-experts 128 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 "
    "--moe-permute-fusion --moe-aux-loss-coeff 0"
)

MODEL_ARGS: Mapping[str, str] = {
    "qwen2.5-7B": f"{_DENSE} --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 "
    "--group-query-attention --num-query-groups 4 --add-qkv-bias --norm-epsilon 1e-06 --rotary-base 1000000 "
    "--vocab-size 152064 --untie-embeddings-and-output-weights",
    "qwen3-4B": f"{_DENSE} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 "
    "--kv-channels 128 --qk-layernorm",
    "qwen3-8B": f"{_DENSE} --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 "
    "--kv-channels 128 --qk-layernorm --untie-embeddings-and-output-weights",
    "qwen3-30B-A3B": f"{_SOFTMAX} --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 --num-layers 48 "
    f"--hidden-size 2048 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768 --moe-layer-freq {layers(0, 48)}",
    "qwen3-235B-A22B": f"{_SOFTMAX} --num-attention-heads 64 --num-query-groups 4 --kv-channels 128 --num-layers 94 "
    f"--hidden-size 4096 --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 --moe-layer-freq {layers(0, 94)}",
    "glm-z1-9B": f"--spec slime_plugins.models.glm4 get_glm_spec {_DENSE} --num-layers 40 --hidden-size 4096 "
    "--ffn-hidden-size 13696 --num-attention-heads 32 --group-query-attention --num-query-groups 2 --add-qkv-bias "
    "--norm-epsilon 1e-5 --rotary-base 10000 --vocab-size 151552 --post-self-attn-layernorm --post-mlp-layernorm "
    "--rotary-interleaved --rotary-percent 0.5 --no-rope-fusion --untie-embeddings-and-output-weights",
    "glm-4.5-Air": f"{_SIGMOID} --disable-bias-linear --group-query-attention --num-attention-heads 96 "
    "--num-query-groups 8 --kv-channels 128 --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 "
    "--add-qkv-bias --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --swiglu "
    "--untie-embeddings-and-output-weights --vocab-size 151552 --rotary-base 1000000 --moe-ffn-hidden-size 1408 "
    "--moe-shared-expert-intermediate-size 1408 --moe-router-topk 8 --num-experts 128 --moe-layer-freq [0]*1+[1]*45",
    "moonlight-16B-A3B": f"{_LATENT} {_SIGMOID} --num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 "
    "--num-attention-heads 16 --kv-channels 128 --norm-epsilon 1e-5 --rotary-percent 1.0 --no-masked-softmax-fusion "
    "--vocab-size 163840 --rotary-scaling-factor 1 --rotary-base 50000 --num-experts 64 --moe-ffn-hidden-size 1408 "
    "--moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 --moe-router-group-topk 1 "
    "--moe-router-num-groups 1 --moe-router-topk-scaling-factor 2.446 --moe-token-drop-policy probs "
    f"--moe-layer-freq {layers(1, 27)}",
    "deepseek-v3": f"{_LATENT} {_SIGMOID} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --kv-channels 128 --norm-epsilon 1e-6 --vocab-size 129280 --q-lora-rank 1536 "
    "--rotary-scaling-factor 40 --rotary-base 10000 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-group-topk 4 --moe-router-num-groups 8 "
    f"--moe-router-topk-scaling-factor 2.5 --moe-layer-freq {layers(3, 61)}",
    "kimi-k2": f"{_LATENT} {_SIGMOID} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 64 --kv-channels 64 --norm-epsilon 1e-6 --vocab-size 163840 --q-lora-rank 1536 "
    "--rotary-scaling-factor 32.0 --rotary-base 50000 --num-experts 384 --moe-ffn-hidden-size 2048 "
    "--moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 --moe-router-group-topk 1 "
    f"--moe-router-num-groups 1 --moe-router-topk-scaling-factor 2.827 --moe-layer-freq {layers(1, 61)}",
}
"""scripts/models/: each must agree with the checkpoint that it is for."""

TAKEN: Sequence[tuple[str, str, object]] = (
    ("--optimizer-cpu-offload", "megatron.optimizer_cpu_offload", True),
    ("--overlap-cpu-optimizer-d2h-h2d", "megatron.overlap_cpu_optimizer_d2h_h2d", True),
    ("--use-precision-aware-optimizer", "megatron.use_precision_aware_optimizer", True),
    ("--no-check-for-nan-in-loss-and-grad", "megatron.check_for_nan_in_grad", False),
    ("--actor-num-nodes 1", "placement.actor_num_nodes", 1),
    ("--actor-num-gpus-per-node 8", "placement.actor_num_gpus_per_node", 8),
    ("--rollout-num-gpus 4", "placement.rollout_num_gpus", 4),
    ("--rollout-num-gpus-per-engine 2", "placement.rollout_num_gpus_per_engine", 2),
    ("--colocate", "placement.colocate", True),
    ("--save-interval 20", "checkpoint.save_interval", 20),
    ("--input-key prompt", "data.input_key", "prompt"),
    ('--multimodal-keys {"image":"images"}', "data.multimodal_keys", {"image": "images"}),
    ("--label-key label", "data.label_key", "label"),
    ("--metadata-key metadata", "data.metadata_key", "metadata"),
    ("--apply-chat-template", "data.apply_chat_template", True),
    ("--rollout-shuffle", "data.rollout_shuffle", True),
    ("--num-epoch 3", "data.num_epoch", 3),
    ("--rm-type deepscaler", "reward.rm_type", "deepscaler"),
    ("--reward-key score", "reward.reward_key", "score"),
    ("--rm-url http://127.0.0.1:13141/generate", "reward.rm_url", "http://127.0.0.1:13141/generate"),
    ("--custom-rm-path generate_with_retool.reward_func", "reward.custom_rm_path", "generate_with_retool.reward_func"),
    ("--num-rollout 3000", "rollout.num_rollout", 3000),
    ("--rollout-batch-size 32", "rollout.rollout_batch_size", 32),
    ("--n-samples-per-prompt 8", "rollout.n_samples_per_prompt", 8),
    ("--rollout-max-response-len 8192", "rollout.rollout_max_response_len", 8192),
    ("--rollout-max-context-len 16384", "rollout.rollout_max_context_len", 16384),
    ("--rollout-temperature 0.8", "rollout.rollout_temperature", 0.8),
    ("--rollout-top-p 0.95", "rollout.rollout_top_p", 0.95),
    ("--rollout-stop-token-ids 151329 151336 151338", "rollout.rollout_stop_token_ids", (151329, 151336, 151338)),
    ("--over-sampling-batch-size 256", "rollout.over_sampling_batch_size", 256),
    ("--custom-generate-function-path a.generate", "rollout.custom_generate_function_path", "a.generate"),
    ("--rollout-function-path a.generate_rollout", "rollout.rollout_function_path", "a.generate_rollout"),
    ("--rollout-all-samples-process-path a.f", "rollout.rollout_all_samples_process_path", "a.f"),
    ("--eval-function-path a.generate_rollout", "eval.eval_function_path", "a.generate_rollout"),
    ("--global-batch-size 256", "train.global_batch_size", 256),
    ("--num-steps-per-rollout 4", "train.num_steps_per_rollout", 4),
    ("--balance-data", "train.balance_data", True),
    ("--micro-batch-size 1", "train.micro_batch_size", 1),
    ("--use-dynamic-batch-size", "train.use_dynamic_batch_size", True),
    ("--max-tokens-per-gpu 9216", "train.max_tokens_per_gpu", 9216),
    ("--advantage-estimator gspo", "train.advantage_estimator", "gspo"),
    ("--use-kl-loss", "train.use_kl_loss", True),
    ("--kl-loss-coef 0.00", "train.kl_loss_coef", 0.0),
    ("--kl-loss-type low_var_kl", "train.kl_loss_type", "low_var_kl"),
    ("--kl-coef 0.00", "train.kl_coef", 0.0),
    ("--entropy-coef 0.00", "train.entropy_coef", 0.0),
    ("--eps-clip 4e-4", "train.eps_clip", 4e-4),
    ("--eps-clip-high 0.28", "train.eps_clip_high", 0.28),
    ("--use-tis", "train.use_tis", True),
    ("--loss-type sft_loss", "train.loss_type", "sft_loss"),
    ("--calculate-per-token-loss", "train.calculate_per_token_loss", True),
    ("--use-rollout-routing-replay", "train.use_rollout_routing_replay", True),
    ("--custom-reward-post-process-path a.post", "hooks.custom_reward_post_process_path", "a.post"),
    ("--rollout-sample-filter-path a.f", "hooks.rollout_sample_filter_path", "a.f"),
    ("--custom-rollout-log-function-path a.f", "hooks.custom_rollout_log_function_path", "a.f"),
    ("--custom-eval-rollout-log-function-path a.f", "hooks.custom_eval_rollout_log_function_path", "a.f"),
    ("--custom-convert-samples-to-train-data-path a.f", "hooks.custom_convert_samples_to_train_data_path", "a.f"),
    ("--custom-megatron-init-path a.f", "hooks.custom_megatron_init_path", "a.f"),
    ("--custom-model-provider-path a.f", "hooks.custom_model_provider_path", "a.f"),
    ("--custom-megatron-before-log-prob-hook-path a.f", "hooks.custom_megatron_before_log_prob_hook_path", "a.f"),
    ("--debug-rollout-only", "debug.debug_rollout_only", True),
    ("--save-debug-rollout-data data_{rollout_id}.pt", "debug.save_debug_rollout_data", "data_{rollout_id}.pt"),
    ("--load-debug-rollout-data data_{rollout_id}.pt", "debug.load_debug_rollout_data", "data_{rollout_id}.pt"),
    ("--eval-interval 20", "eval.eval_interval", 20),
    ("--n-samples-per-eval-prompt 16", "eval.n_samples_per_eval_prompt", 16),
    ("--eval-max-response-len 16384", "eval.eval_max_response_len", 16384),
    ("--eval-temperature 1.0", "eval.eval_temperature", 1.0),
    ("--eval-top-p 0.7", "eval.eval_top_p", 0.7),
    ("--eval-top-k 1", "eval.eval_top_k", 1),
    ("--skip-eval-before-train", "eval.skip_eval_before_train", True),
    ("--use-wandb", "tracking.use_wandb", True),
    ("--wandb-project slime-dev", "tracking.wandb_project", "slime-dev"),
    ("--wandb-group qwen3-4B-test", "tracking.wandb_group", "qwen3-4B-test"),
    ("--update-weight-buffer-size 536870912", "publish.update_weight_buffer_size", 536870912),
    ("--train-backend megatron", "megatron.train_backend", "megatron"),
    ("--tensor-model-parallel-size 2", "megatron.tensor_model_parallel_size", 2),
    ("--sequence-parallel", "megatron.sequence_parallel", True),
    ("--pipeline-model-parallel-size 4", "megatron.pipeline_model_parallel_size", 4),
    ("--context-parallel-size 2", "megatron.context_parallel_size", 2),
    ("--expert-model-parallel-size 8", "megatron.expert_model_parallel_size", 8),
    ("--expert-tensor-parallel-size 1", "megatron.expert_tensor_parallel_size", 1),
    ("--decoder-last-pipeline-num-layers 13", "megatron.num_layers_in_last_pipeline_stage", 13),
    ("--recompute-granularity full", "megatron.recompute_granularity", "full"),
    ("--recompute-method uniform", "megatron.recompute_method", "uniform"),
    ("--recompute-num-layers 1", "megatron.recompute_num_layers", 1),
    ("--optimizer adam", "megatron.optimizer", "adam"),
    ("--lr 1e-6", "megatron.lr", 1e-6),
    ("--lr-decay-style cosine", "megatron.lr_decay_style", "cosine"),
    ("--min-lr 1e-6", "megatron.min_lr", 1e-6),
    ("--lr-warmup-fraction 0.1", "megatron.lr_warmup_fraction", 0.1),
    ("--weight-decay 0.1", "megatron.weight_decay", 0.1),
    ("--adam-beta1 0.9", "megatron.adam_beta1", 0.9),
    ("--adam-beta2 0.98", "megatron.adam_beta2", 0.98),
    ("--attention-dropout 0.0", "megatron.attention_dropout", 0.0),
    ("--hidden-dropout 0.0", "megatron.hidden_dropout", 0.0),
    ("--accumulate-allreduce-grads-in-fp32", "megatron.grad_reduce_in_fp32", True),
    ("--grad-reduce-in-bf16", "megatron.grad_reduce_in_fp32", False),
    ("--attention-softmax-in-fp32", "megatron.attention_softmax_in_fp32", True),
    ("--attention-backend flash", "megatron.attention_backend", "flash"),
    ("--no-gradient-accumulation-fusion", "megatron.gradient_accumulation_fusion", False),
    ("--no-rope-fusion", "megatron.apply_rope_fusion", False),
    ("--deterministic-mode", "megatron.deterministic_mode", True),
    ("--moe-token-dispatcher-type flex", "megatron.moe_token_dispatcher_type", "flex"),
    ("--moe-enable-deepep", "megatron.moe_enable_deepep", True),
    ("--bf16", "megatron.bf16", True),
    ("--fp8-format e4m3", "megatron.fp8", "e4m3"),
    ("--fp8-recipe blockwise", "megatron.fp8_recipe", "blockwise"),
    ("--sglang-mem-fraction-static 0.7", "sglang.mem_fraction_static", 0.7),
    ("--sglang-cuda-graph-bs-decode 1 2 4", "sglang.cuda_graph_bs_decode", [1, 2, 4]),
    ("--sglang-enable-dp-attention", "sglang.enable_dp_attention", True),
    ("--sglang-dp-size 8", "sglang.dp_size", 8),
    ("--sglang-ep-size 16", "sglang.ep_size", 16),
    ("--sglang-speculative-algorithm EAGLE", "sglang.speculative_algorithm", "EAGLE"),
    ("--sglang-enable-deterministic-inference", "sglang.enable_deterministic_inference", True),
)
"""(flag and value, the option that it sets, to what)."""

REFUSED: Sequence[tuple[str, str]] = (
    ("--disable-compute-advantages-and-returns", "sft_loss computes none"),
    ("--wandb-key abc", "WANDB_API_KEY"),
    ("--wandb-run-id x", "named after --run-name"),
    ("--disable-wandb-random-suffix", "named after --run-name"),
    ("--use-slime-router", "--router-policy"),
    ("--slime-router-middleware-paths a.B", "--router-policy"),
    ("--sglang-server-concurrency 1024", "--max-groups-in-flight"),
    ("--sglang-cuda-graph-bs 1 2 4 8 16", "it has cuda_graph_bs_decode, cuda_graph_bs_prefill"),
    ("--sglang-enable-ep-moe", "SGLang has no argument enable_ep_moe"),
    ("--eval-config multi_task.yaml", "write the data sets as TOML"),
    ('--multimodal-keys {"video":"videos"}', "media of type 'video' are not supported"),
    ("--train-backend fsdp", "--train-backend: should be 'megatron', got 'fsdp'"),
    ("--gradient-checkpointing", "--recompute-granularity"),
    ("--attn-implementation flash_attention_3", "--attention-backend"),
    ("--megatron-to-hf-mode bridge", "headrace's own tables"),
    ("--enable-mtp-training", "not trained"),
    ("--data-pad-size-multiplier 4096", "as the layout needs"),
    ("--log-probs-chunk-size 1024", "within a fixed memory"),
    ("--transformer-impl transformer_engine", "transformer_impl cannot be set by a job"),
    ("--advantage-estimator on_policy_distillation", "--advantage-estimator: should be 'grpo'"),
    ("--loss-mask-type glm5", "--loss-mask-type: should be"),
    ("--attention-dropout 0.1", "--attention-dropout: should be 0"),
    ("--no-load-rng", "--initial-megatron-checkpoint"),
    ("--no-load-optim", "--initial-megatron-checkpoint"),
)
"""(flag and value, what the refusal says to do)."""
