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

SAME_NAME = """
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer --actor-num-nodes 1
--actor-num-gpus-per-node 8 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --colocate --save-interval 20
--input-key prompt --label-key label --metadata-key metadata --apply-chat-template --rollout-shuffle --num-epoch 3
--rm-type deepscaler --reward-key score --rm-url http://127.0.0.1:13141/generate --custom-rm-path
generate_with_retool.reward_func --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --rollout-max-context-len 16384 --rollout-temperature 0.8 --rollout-top-p 0.95
--over-sampling-batch-size 256 --custom-generate-function-path a.generate --rollout-function-path a.generate_rollout
--rollout-all-samples-process-path a.f --eval-function-path a.generate_rollout --global-batch-size 256
--num-steps-per-rollout 4 --balance-data --micro-batch-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
--advantage-estimator gspo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef
0.00 --eps-clip 4e-4 --eps-clip-high 0.28 --use-tis --loss-type sft_loss --calculate-per-token-loss
--use-rollout-routing-replay --custom-reward-post-process-path a.post --rollout-sample-filter-path a.f
--custom-rollout-log-function-path a.f --custom-eval-rollout-log-function-path a.f
--custom-convert-samples-to-train-data-path a.f --custom-megatron-init-path a.f --custom-model-provider-path a.f
--custom-megatron-before-log-prob-hook-path a.f --debug-rollout-only --save-debug-rollout-data data_{rollout_id}.pt
--load-debug-rollout-data data_{rollout_id}.pt --eval-interval 20 --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-temperature 1.0 --eval-top-p 0.7 --eval-top-k 1 --skip-eval-before-train
--use-wandb --wandb-project slime-dev --wandb-group qwen3-4B-test --update-weight-buffer-size 536870912
--train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
--context-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute-granularity full
--recompute-method uniform --recompute-num-layers 1 --optimizer adam --lr 1e-6 --lr-decay-style cosine --min-lr 1e-6
--lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout 0.0
--hidden-dropout 0.0 --attention-softmax-in-fp32 --attention-backend flash --deterministic-mode
--moe-token-dispatcher-type flex --moe-enable-deepep --bf16 --fp8-recipe blockwise
"""
"""Flags whose option has their name, with values: a flag without one switches it on."""

TAKEN: Sequence[tuple[str, str, object]] = (
    ("--no-check-for-nan-in-loss-and-grad", "megatron.check_for_nan_in_grad", False),
    ('--multimodal-keys {"image":"images"}', "data.multimodal_keys", {"image": "images"}),
    ("--rollout-stop-token-ids 151329 151336 151338", "rollout.rollout_stop_token_ids", (151329, 151336, 151338)),
    ("--decoder-last-pipeline-num-layers 13", "megatron.num_layers_in_last_pipeline_stage", 13),
    ("--accumulate-allreduce-grads-in-fp32", "megatron.grad_reduce_in_fp32", True),
    ("--grad-reduce-in-bf16", "megatron.grad_reduce_in_fp32", False),
    ("--no-gradient-accumulation-fusion", "megatron.gradient_accumulation_fusion", False),
    ("--no-rope-fusion", "megatron.apply_rope_fusion", False),
    ("--fp8-format e4m3", "megatron.fp8", "e4m3"),
    ("--sglang-mem-fraction-static 0.7", "sglang.mem_fraction_static", 0.7),
    ("--sglang-cuda-graph-bs-decode 1 2 4", "sglang.cuda_graph_bs_decode", [1, 2, 4]),
    ("--sglang-enable-dp-attention", "sglang.enable_dp_attention", True),
    ("--sglang-dp-size 8", "sglang.dp_size", 8),
    ("--sglang-ep-size 16", "sglang.ep_size", 16),
    ("--sglang-speculative-algorithm EAGLE", "sglang.speculative_algorithm", "EAGLE"),
    ("--sglang-enable-deterministic-inference", "sglang.enable_deterministic_inference", True),
)
"""(flag and value, the option of another name or form that it sets, to what)."""

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
    ("--model-provider bridge", "megatron-bridge is not supported"),
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
