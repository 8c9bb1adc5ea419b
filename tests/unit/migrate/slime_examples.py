"""Launch scripts in the form of slime's own: which flags stand together, with what values. Written here, not copied."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping

_HEAD = """#!/bin/bash
# for rerun the task
pkill -9 sglang
set -ex
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then
    HAS_NVLINK=1
else
    HAS_NVLINK=0
fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/MODEL.sh"
"""
_TAIL = """
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --dashboard-port=8265
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/\\",
    \\"NCCL_NVLS_ENABLE\\": \\"${HAS_NVLINK}\\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 PROGRAM \\
   LAUNCH \\
   ${MODEL_ARGS[@]} \\
   GROUPS
"""

CKPT = "--hf-checkpoint D/M --ref-load D/M_torch_dist --load D/M_slime/ --save D/M_slime/ --save-interval 20"
DATA = (
    "--prompt-data D/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template "
    "--rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 8192 --rollout-temperature 0.8"
)
BATCH = f"{DATA} --global-batch-size 256 --balance-data"
DAPO = (
    f"{DATA} --over-sampling-batch-size 256 --dynamic-sampling-filter-path "
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std --num-steps-per-rollout 4 "
    "--balance-data --rollout-batch-size 128"
)
EVAL = (
    "--eval-interval 20 --eval-prompt-data aime D/aime-2024.jsonl --n-samples-per-eval-prompt 16 "
    "--eval-max-response-len 16384 --eval-top-p 0.7"
)
_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
    "--eps-clip 0.2 --eps-clip-high 0.28"
)
GSPO = (
    "--advantage-estimator gspo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00 "
    "--eps-clip 4e-4"
)
ADAM = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"
OFFLOAD = f"{ADAM} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
MISC = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
    "--attention-backend flash"
)
DEEPEP = "--moe-enable-deepep --moe-token-dispatcher-type flex"
GRAPHS = "--sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)"
DP_ATTENTION = "--sglang-enable-dp-attention --sglang-dp-size 8 --sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1"
SFT = (
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data D/openhermes2_5.parquet "
    "--input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128 "
    "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only"
)
SFT_ADAM = (
    "--optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95"
)
ONE_MACHINE = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"


def layout(tensor: int, pipeline: int = 1, context: int = 1, expert: int = 1, tokens: int = 9216) -> str:
    return (
        f"--tensor-model-parallel-size {tensor} --sequence-parallel --pipeline-model-parallel-size {pipeline} "
        f"--context-parallel-size {context} --expert-model-parallel-size {expert} --expert-tensor-parallel-size 1 "
        f"{_LAYERS} --use-dynamic-batch-size --max-tokens-per-gpu {tokens}"
    )


def script(*groups: str, launch: str = ONE_MACHINE, program: str = "train.py", folder: str = "/mnt/slime") -> str:
    arrays, names = [], []
    for number, group in enumerate(groups):
        lines = "\n".join(f"   {flag}" for flag in group.replace("D/", f"{folder}/").split(" --"))
        arrays.append(f"GROUP{number}_ARGS=(\n{lines}\n   # --commented out\n)\n".replace("\n   ", "\n   --").replace(
            "----", "--").replace("--# ", "# "))  # fmt: skip
        names.append(f"${{GROUP{number}_ARGS[@]}}")
    tail = _TAIL.replace("PROGRAM", program).replace("LAUNCH", launch).replace("GROUPS", " \\\n   ".join(names))
    return _HEAD + "\n".join(arrays) + tail


def _many(nodes: int, more: str = "") -> str:
    return f"--actor-num-nodes {nodes} --actor-num-gpus-per-node 8 {more}"


_ENGINE = "--sglang-mem-fraction-static 0.7 --rollout-num-gpus-per-engine"
_EAGLE = (
    "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 "
    "--sglang-speculative-num-draft-tokens 4"
)
_FSDP = "--train-backend fsdp --update-weight-buffer-size 536870912 --gradient-checkpointing --attn-implementation flash_attention_3"
_BASE = "$BASE_DIR"
_NO_SAVE = "--hf-checkpoint D/M --ref-load D/M_torch_dist/"
_PLAIN = (CKPT, BATCH, EVAL, layout(2), GRPO, ADAM, f"{_ENGINE} 2", MISC)
_RETOOL = (
    "--custom-generate-function-path generate_with_retool.generate --custom-rm-path generate_with_retool.reward_func"
)

SCRIPTS: Mapping[str, str] = {
    "qwen3-4B": script(*_PLAIN),
    "deepseek-r1-distill-qwen-1.5B": script(*_PLAIN, "--rm-type math --lr 2e-6"),
    "qwen3-4B-amd": script(*_PLAIN, "--no-gradient-accumulation-fusion", folder="${MODEL_DIR}"),
    "qwen3-8B-amd": script(*_PLAIN, "--no-gradient-accumulation-fusion", folder="${MODEL_DIR}"),
    "llama3.2-3B-Instruct-amd": script(*_PLAIN, "--num-epoch 1 --rm-type math", folder="${MODEL_DIR}"),
    "llama3.1-8B": script(*_PLAIN, "--rollout-max-prompt-len 256 --rm-type math"),
    "qwen3-4B_4xgpu": script(*_PLAIN, launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate"),
    "qwen3-32B": script(CKPT, BATCH, EVAL, layout(8), GRPO, OFFLOAD, f"{_ENGINE} 8", MISC),
    "glm4-9B": script(
        CKPT, BATCH, EVAL, layout(2, context=2, tokens=4608), GRPO, ADAM,
        "--use-wandb --wandb-project slime-dev --wandb-group test --wandb-key ${WANDB_API_KEY}",
        f"{_ENGINE} 1 --sglang-enable-deterministic-inference --sglang-attention-backend fa3", MISC,
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4",
    ),
    "glm4-9B-4xgpu-radixtree": script(
        *_PLAIN, "--use-slime-router --slime-router-middleware-paths slime.router.middleware_hub.radix_tree.Middleware",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate",
    ),
    "qwen3-4B_4xgpu-radixtree": script(
        CKPT, BATCH, EVAL, layout(1, 2, tokens=2304), GRPO, ADAM, MISC, "--micro-batch-size 1 --rotary-base 5000000",
        "--rollout-num-gpus-per-engine 1 --use-slime-router --slime-router-middleware-paths slime.router.a.Middleware",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate",
    ),
    "eagle3-llama3.1-8B": script(
        CKPT, BATCH, layout(2), GRPO, ADAM, f"{_ENGINE} 1 --rollout-max-prompt-len 256", MISC, _EAGLE,
        "--sglang-speculative-draft-model-path /root/EAGLE3 --sglang-max-running-requests 48 --sglang-dtype float16 "
        "--sglang-context-length 2048 --sglang-attention-backend fa3",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus-per-node 4 --colocate",
    ),
    "mimo-7B-rl": script(*_PLAIN),
    "mimo-7B-rl-eagle": script(*_PLAIN, _EAGLE, "--enable-mtp-training --mtp-loss-scaling-factor 0.2"),
    "mimo-7B-rl-mtp": script(*_PLAIN, _EAGLE, "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2"),
    "qwen3-30B-A3B": script(
        _NO_SAVE, BATCH, "--eval-prompt-data aime D/aime-2024.jsonl --n-samples-per-eval-prompt 16",
        layout(4, expert=8, tokens=20480), f"{GRPO} --use-tis --tis-level geometric", OFFLOAD, f"{_ENGINE} 8", GRAPHS,
        "--use-wandb --wandb-project slime-dev --wandb-run-id a --wandb-key ${WANDB_KEY}", MISC,
    ),
    "qwen3-30B-A3B-lora": script(
        CKPT, "--use-lora --lora-target-preset moe_language_all --lora-rank 32 --lora-alpha 64 --save-lora "
        "D/M_lora/{rollout_id} --lora-weight-decay 0.1", BATCH, EVAL, layout(4, expert=8), GRPO, OFFLOAD, GRAPHS,
        f"{_ENGINE} 8", MISC,
    ),
    "qwen3-30B-A3B-fsdp": script(
        "--hf-checkpoint D/M", BATCH, EVAL, "--use-dynamic-batch-size --max-tokens-per-gpu 20480", GRPO, ADAM, _FSDP,
        f"{_ENGINE} 8", GRAPHS,
    ),
    "qwen3-next-80B-A3B-fsdp": script(
        "--hf-checkpoint D/M", BATCH, EVAL, "--use-dynamic-batch-size --max-tokens-per-gpu 8192", GRPO, ADAM, _FSDP,
        f"{_ENGINE} 8", folder="${BASE_FOLDER}",
    ),
    "qwen3-vl-8B-fsdp": script(
        "--hf-checkpoint D/M", f"{BATCH} --rm-type math", "--multimodal-keys '{\"image\": \"images\"}'", EVAL, GRPO, ADAM,
        f"{_FSDP} --update-weight-buffer-size $((512 * 1024 * 1024)) --sglang-attention-backend fa3", f"{_ENGINE} 1",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node ${NUM_GPUS:-8} --colocate",
    ),
    "qwen3-30B-A3B-fp8-train-infer": script(
        CKPT, BATCH, EVAL, f"{layout(1, 4, expert=4)} {DEEPEP} --transformer-impl transformer_engine --bf16 "
        "--fp8-format e4m3 --fp8-recipe blockwise", f"{GRPO} --use-tis", OFFLOAD, f"{_ENGINE} 8", GRAPHS,
        "--sglang-expert-parallel-size 8 --use-slime-router", MISC, launch=_many(2, "--colocate"),
    ),
    "qwen3-30b-a3b-fp8": script(
        CKPT, BATCH, EVAL, f"{layout(4, expert=8)} --fp8-format e4m3 --fp8-recipe blockwise", GRPO, OFFLOAD,
        f"{_ENGINE} 8", GRAPHS, MISC,
    ),
    "qwen3-4b-fp8": script(*_PLAIN, "--transformer-impl transformer_engine --bf16 --fp8-format e4m3 --fp8-recipe blockwise"),
    "qwen3-30B-A3B-int4": script(
        CKPT, BATCH, "--eval-interval 10 --eval-prompt-data D/aime-2024.jsonl", layout(4, expert=8),
        f"{GRPO} --use-tis", OFFLOAD, f"{_ENGINE} 1", GRAPHS, MISC,
    ),
    "qwen3.5-35B-A3B-int4-qat-rl": script(
        CKPT, BATCH, layout(1, expert=4, tokens=4096), f"{GRPO} --use-tis", OFFLOAD, MISC,
        f"{_ENGINE} 1 --qwen-gdn-backend fla --sglang-cuda-graph-bs 1 2 4 8",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate", folder="${BASE_FOLDER:-/mnt/q}",
    ),
    "moonlight-16B-A3B": script(CKPT, DAPO, EVAL, layout(4, expert=8), GRPO, OFFLOAD, f"{_ENGINE} 8", GRAPHS, DEEPEP),
    "gpt-oss-20B": script(
        CKPT, BATCH, EVAL, f"{layout(1, 2, expert=4, tokens=1536)} --seq-length 1536",
        "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --num-steps-per-rollout 1",
        f"{SFT_ADAM} --clip-grad 1.0 --micro-batch-size 1",
        "--sglang-dp-attention --rollout-num-gpus 8 --sglang-tp 1 --sglang-mem-fraction-static 0.55",
        "--attention-dropout 0.0 --hidden-dropout 0.0 --moe-token-dispatcher-type alltoall --megatron-to-hf-mode bridge",
    ),
    "qwen3-235B-A22B": script(
        CKPT, BATCH, EVAL.removeprefix("--eval-interval 20 "), f"{layout(4, 4, 2, 16)} --decoder-last-pipeline-num-layers 22",
        GSPO, OFFLOAD, f"{_ENGINE} 32 {DP_ATTENTION} --sglang-ep-size 32", GRAPHS, "--sglang-disable-radix-cache "
        "--sglang-moe-a2a-backend deepep --sglang-deepep-mode auto", MISC, folder="${BASE_FOLDER}",
        launch=_many(8, "--rollout-num-gpus 64 --update-weight-buffer-size $(( 1024 * 1024 * 1024 * 4 ))"),
    ),
    "glm4.5-355B-A32B": script(
        _NO_SAVE, f"{DAPO} --rollout-stop-token-ids 151329 151336 151338", EVAL, layout(8, 4, 2, 16, 16384),
        f"{GSPO} --eps-clip-high 2e-4 --use-tis", OFFLOAD, f"{_ENGINE} 32 --sglang-enable-dp-attention --sglang-dp-size 4",
        MISC, launch=_many(8, "--colocate --save-debug-rollout-data /mnt/data.pt"), folder=_BASE,
    ),
    "glm4.7-30B-A3B": script(
        _NO_SAVE, BATCH, f"{EVAL} --eval-temperature 1.0", f"{layout(2, 2, 2, 4)} --decoder-last-pipeline-num-layers 23",
        "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2", GRPO, OFFLOAD,
        f"{_ENGINE} 8 {DP_ATTENTION} {_EAGLE} --sglang-cuda-graph-max-bs 64 --sglang-max-running-requests 512", MISC, DEEPEP,
        folder=_BASE,
    ),
    "deepseek-r1": script(
        CKPT, DAPO, EVAL, f"{layout(8, 4, 4, 32, 16384)} --decoder-last-pipeline-num-layers 13", GRPO, OFFLOAD,
        f"{_ENGINE} 64 --sglang-enable-ep-moe {DP_ATTENTION} --sglang-enable-deepep-moe --sglang-deepep-mode auto "
        "--sglang-server-concurrency 1024", MISC, DEEPEP, launch=_many(16, "--colocate"), folder=_BASE,
    ),
    "kimi-k2-Instruct": script(
        CKPT, DAPO, EVAL, f"{layout(8, 8, 4, 32, 16384)} --decoder-last-pipeline-num-layers 5", GRPO, OFFLOAD,
        f"{_ENGINE} 16 {DP_ATTENTION} --sglang-ep-size 16 --sglang-server-concurrency 1024", MISC, DEEPEP, folder=_BASE,
        launch=_many(32, "--colocate --update-weight-buffer-size $(( 4 * 512 * 1024 * 1024))"),
    ).replace("1024)) \\", "1024))"),
    "minimax-m2": script(
        f"{CKPT} --megatron-to-hf-mode raw --model-name minimax_m2", DAPO, EVAL, layout(2, 2, expert=4), GRPO, OFFLOAD,
        "--use-tensorboard", f"{_ENGINE} 16 --sglang-ep-size 16", MISC, launch=_many(4, "--colocate"),
        folder='${BASE_DIR:-"/mnt/a"}',
    ),
    "qwen3-next-80B-A3B-8gpus": script(
        CKPT, BATCH, EVAL, layout(1, 4, tokens=128), GSPO, OFFLOAD, "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 4 "
        "--sglang-mem-fraction-static 0.8 --sglang-ep-size 1", GRAPHS, f"{MISC} --grad-reduce-in-bf16",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4", folder="${BASE_FOLDER}",
    ),
    "gemma4-26B-A4B-gsm8k": script(
        CKPT, BATCH.replace("3000", '"${NUM_ROLLOUT:-2}"'), f"{layout(2, 2, expert=2)} --calculate-per-token-loss",
        "--advantage-estimator grpo --entropy-coef \"${ENTROPY_COEF:-0.001}\" --eps-clip 0.2", OFFLOAD,
        '--rollout-num-gpus-per-engine "${ROLLOUT_TP_SIZE:-8}" --sglang-mem-fraction-static "${SGLANG_MEM:-0.20}"',
        f"{MISC} --loss-mask-type gemma4 --megatron-to-hf-mode raw", folder="${BASE_DIR:-/mnt/a}",
    ).replace("MASTER_ADDR=", 'EVAL_ARGS=()\nif [ "${ENABLE_EVAL:-0}" = "1" ]; then\n  EVAL_ARGS=( --eval-interval 20 )\nfi\nX=', 1),
    "qwen3-4B-base-sft": script(CKPT, SFT, layout(1), SFT_ADAM, MISC, program="train_async.py", launch=_many(1)),
    "qwen3-235B-A22B-sft": script(
        CKPT, SFT, layout(4, expert=32), f"{SFT_ADAM} --optimizer-cpu-offload --use-precision-aware-optimizer", MISC,
        program="train_async.py", launch=_many(4), folder="${BASE_FOLDER}",
    ),
    "qwen3.5-35B-A3B-sft": script(
        CKPT, f"{SFT} --loss-mask-type qwen3_5", layout(2, expert=8), f"{SFT_ADAM} --use-distributed-optimizer",
        "--use-tensorboard --tb-project-name sft", "--log-sft-entropy", MISC, DEEPEP, program="train_async.py",
        launch=_many(1), folder="${BASE_FOLDER}",
    ),
    "glm5-744B-A40B-sft": script(
        CKPT, f"{SFT} --loss-mask-type glm5", f"{layout(4, 4, 2, 32)} --data-pad-size-multiplier 4096", SFT_ADAM, MISC,
        DEEPEP, program="train_async.py", launch=_many(32), folder=_BASE,
    ),
    "fully_async-qwen3-4b": script(
        CKPT, f"{BATCH} --rollout-function-path fully_async_rollout.generate_rollout_fully_async --rm-type dapo "
        "--reward-key score", layout(2), f"{GRPO} --use-tis", ADAM, "--rollout-num-gpus-per-engine 1", MISC,
        program="train_async.py", launch="--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4",
    ),
    "retool-qwen3-4b": script(*_PLAIN, "--reward-key score", _RETOOL).replace("--rm-type deepscaler", ""),
    "on_policy_distillation-qwen3-8B": script(
        CKPT, BATCH, "--custom-rm-path examples.distillation.reward_func --rm-url http://127.0.0.1:13141/generate",
        layout(2), GRPO.replace("grpo", "on_policy_distillation"), ADAM, f"{_ENGINE} 1", MISC,
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 4",
    ).replace("--rm-type deepscaler", ""),
    "qwen3-30B-A3B-nvfp4": script(
        CKPT, BATCH, layout(1, expert=2), GRPO, OFFLOAD, f"{_ENGINE} 2", GRAPHS, MISC,
        "--use-wandb --wandb-mode offline --wandb-project slime-dev --wandb-dir /home/x --use-pytorch-profiler "
        "--profile-step-start 5 --tensorboard-dir /home/x --record-memory-history",
        "--transformer-impl transformer_engine --bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
        launch="--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate",
    ),
    "qwen3-0.6B-single-gpu": """#!/usr/bin/env bash
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/models/qwen3-0.6B.sh"
HF_CHECKPOINT="${HF_CHECKPOINT:-/m/Qwen3-0.6B}"
NUM_ROLLOUT="${NUM_ROLLOUT:-10}"
if [[ -z "${LOAD_CHECKPOINT:-}" ]]; then
   if [[ -f "/m/latest_checkpointed_iteration.txt" ]]; then
      LOAD_CHECKPOINT="/m/saved"
   else
      LOAD_CHECKPOINT="/m/first"
   fi
fi
for path in "$HF_CHECKPOINT"; do
   if [[ ! -e "$path" ]]; then
      echo "Missing: $path" >&2
      exit 2
   fi
done
if ! ray status >/dev/null 2>&1; then
   ray start --head --num-gpus 1
fi
ray job submit --runtime-env-json="{\\"env_vars\\":{\\"PYTHONPATH\\":\\"${MEGATRON_ROOT}\\"}}" \\
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate --hf-checkpoint "$HF_CHECKPOINT" \\
   --load "$LOAD_CHECKPOINT" --prompt-data /m/gsm8k.parquet --input-key messages --label-key label --rm-type math \\
   --num-rollout "$NUM_ROLLOUT" --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8 \\
   --eval-interval "$NUM_ROLLOUT" --eval-prompt-data gsm8k /m/test.parquet --use-kl-loss "${MODEL_ARGS[@]}"
""",
    "geo3k_vlm": script(
        "--hf-checkpoint D/${MODEL_NAME}", "--prompt-data D/${LOCAL}/train.parquet --input-key problem --label-key answer "
        "--rm-type math --rollout-batch-size 64 --n-samples-per-prompt 8", "--eval-interval 20 --eval-prompt-data ${LOCAL} "
        "D/${LOCAL}/test.parquet", GRPO, ADAM, launch=f"{ONE_MACHINE} ${{BACKEND_ARGS[@]}} --multimodal-keys \"${{KEYS}}\"",
    ).replace("#!/bin/bash", """#!/bin/bash
TRAIN_BACKEND=${SLIME_SCRIPT_TRAIN_BACKEND:-"megatron"}
MODEL_NAME=${SLIME_SCRIPT_MODEL_NAME:-"Qwen3-VL-8B-Instruct"}
LOCAL=$(basename "$DATASET_NAME")
KEYS='{"image": "images"}'
if ! echo "$MODEL_NAME" | grep -qw Qwen3; then
   exit 1
fi
if [ "$TRAIN_BACKEND" = "fsdp" ]; then
   BACKEND_ARGS=( --train-backend fsdp --gradient-checkpointing )
else
   BACKEND_ARGS=(
      --train-backend megatron
      --tensor-model-parallel-size 4
   )
   MODEL_ARGS+=(--rotary-base 5000000)
fi"""),
}  # fmt: skip
