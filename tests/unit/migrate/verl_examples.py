"""Scripts in the form of verl's own examples: which settings stand together, with what values. Written here."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping

_DATA = (
    "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet "
    "data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 "
    "data.filter_overlong_prompts=True data.truncation='error'"
)
_TWO_SETS = (
    'data.train_files="$train_files" data.val_files="$test_files" data.train_batch_size=1024 '
    "data.max_prompt_length=1024 data.max_response_length=512 data.return_raw_chat=True"
)
_LISTS = """gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"
test_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
"""
_ACTOR = (
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 "
    "actor_rollout_ref.model.enable_gradient_checkpointing=True "
    "actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False"
)
_KL = (
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0"
)
_ROLLOUT = (
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6"
)
_GROUP = (
    "actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False"
)
_CRITIC = (
    "critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.optim.lr_warmup_steps_ratio=0.05 "
    "critic.model.path=Qwen/Qwen2-7B-Instruct critic.model.enable_gradient_checkpointing=False "
    "critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False"
)
_TRAINER = (
    "trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name='verl_example' "
    "trainer.experiment_name='qwen2_7b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 "
    "trainer.test_freq=5 trainer.total_epochs=15"
)
_MEGATRON = (
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"
)
_DAPO_HEAD = """NNODES=${NNODES:-1}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 10 / 10))
loss_agg_mode="token-mean"
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=$RAY_DATA_HOME/models/M
TRAIN_FILE=$RAY_DATA_HOME/dataset/dapo-math-17k.parquet
TEST_FILE="['$aime24_test_path']"
COMMON_TP=${COMMON_TP:-1}
TRAIN_TP=${TRAIN_TP:-$COMMON_TP}
COMMON_VPP=${COMMON_VPP:-null}
offload=True
"""
_DAPO = (
    'data.train_files="${TRAIN_FILE}" data.val_files="${TEST_FILE}" data.prompt_key=prompt data.truncation=\'left\' '
    "data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} "
    "data.train_batch_size=512 actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo "
    'algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.model.path="${MODEL_PATH}" '
    "actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 "
    "actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 "
    "actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.model.use_fused_kernels=False "
    "+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=$((max_prompt_length + 1)) "
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=128 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.lr_decay_style='constant' "
    "actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.optim.clip_grad=1.0 "
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=${OFFLOAD_FRACTION:-1.} "
    "+actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True "
    "+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True "
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True "
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing=False "
    "actor_rollout_ref.actor.megatron.param_offload=${offload} actor_rollout_ref.actor.megatron.grad_offload=${offload} "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TRAIN_TP} "
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${COMMON_VPP} "
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP:-8} "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False "
    '+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type="flex" '
    "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 "
    "actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} "
    "actor_rollout_ref.rollout.enable_chunked_prefill=True "
    "actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) "
    "actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 "
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 "
    "actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True "
    "actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.rollout.enforce_eager=True "
    "actor_rollout_ref.rollout.free_cache_engine=True actor_rollout_ref.nccl_timeout=1200 "
    "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
    "trainer.val_before_train=False trainer.resume_mode=auto trainer.log_val_generations=10"
)


def script(*groups: str, head: str = "", options: str = "", end: str = "$@") -> str:
    words = " \\\n    ".join(group.replace(" ", " \\\n    ") for group in groups)
    return f"set -x\n{head}\npython3 -m verl.trainer.main_ppo {options}\\\n    {words} {end}\n"


_GRPO = "algorithm.adv_estimator=grpo"
_GAE = "algorithm.adv_estimator=gae"

SCRIPTS: Mapping[str, str] = {
    "grpo_trainer/run_qwen2-7b": script(_GRPO, _DATA, _ACTOR, _KL, _ROLLOUT, _GROUP, _TRAINER),
    "grpo_trainer/run_qwen2-7b_math_megatron": script(
        _GRPO, _TWO_SETS, "data.return_raw_chat=$return_raw_chat", _ACTOR, _MEGATRON, _KL, _ROLLOUT, _GROUP, _TRAINER,
        "actor_rollout_ref.rollout.mode=$rollout_mode", options="--config-path=config --config-name='megatron.yaml'",
        head=f'rollout_mode="sync"\nif [ "$rollout_mode" = "async" ]; then\n    return_raw_chat="True"\nfi\n{_LISTS}',
    ),
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora": script(
        _GRPO, _DATA, "data.prompt_key=messages data.shuffle=False", _ACTOR, "actor_rollout_ref.model.use_shm=True "
        "actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32", _KL, _ROLLOUT,
        "actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True", _GROUP, _TRAINER,
    ),
    "grpo_trainer/run_qwen2_5_vl-7b": script(
        _GRPO, _DATA, "data.image_key=images", _ACTOR, _KL, _ROLLOUT, "actor_rollout_ref.rollout.name=$ENGINE "
        "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True "
        "actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=False", _GROUP, _TRAINER,
        head="ENGINE=${1:-vllm}",
    ),
    "grpo_trainer/run_qwen3moe-30b_megatron_96gb": script(
        _DAPO, _ROLLOUT, _TRAINER, head=_DAPO_HEAD, options="--config-path=./config --config-name='megatron'", end="",
    ),
    "grpo_trainer/run_deepseek671b_math_megatron_96gb": script(
        _DAPO, "+actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6 "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PP:-12}", _ROLLOUT,
        _TRAINER.replace("trainer.nnodes=1", 'trainer.nnodes="${NNODES}"'),
        'trainer.default_local_dir="$RAY_DATA_HOME/ckpt"', end="", head="NNODES=${NNODES:-12}\n" + _DAPO_HEAD,
    ),
    "grpo_trainer/run_qwen3_8b_grpo_sglang_32k_npu": script(
        _GRPO, _DATA, _ACTOR, _KL, _ROLLOUT.replace("vllm", "sglang"), _GROUP, _TRAINER, "trainer.logger=console",
        '+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend="ascend" '
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.actor.use_torch_compile=False",
        end="trainer.device=npu 2>&1 | tee -i $logs",
    ),
    "ppo_trainer/run_deepseek7b_llm": script(
        _GAE, _DATA, _ACTOR, _ROLLOUT, _CRITIC, "algorithm.use_kl_in_reward=False actor_rollout_ref.actor.use_kl_loss=False",
        _TRAINER, "trainer.total_training_steps=2 trainer.use_legacy_worker_impl=False",
    ),
    "ppo_trainer/run_qwen2-7b_rm": script(
        _TWO_SETS, _ACTOR, _ROLLOUT, _CRITIC, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 "
        "reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-Gemma2-RM-v0.1 reward_model.micro_batch_size=16 "
        "algorithm.kl_ctrl.kl_coef=0.001", _TRAINER, head=_LISTS,
    ),
    "ppo_trainer/run_ppo": script(
        _DATA, "data.val_batch_size=1024", _ACTOR, "critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct "
        "algorithm.kl_ctrl.kl_coef=0.001 +trainer.val_before_train=False reward_model.reward_manager=generative "
        "trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 "
        "trainer.total_epochs=15", end="2>&1 | tee verl_demo.log \\\n trainer.project_name=$YOUR_PROJECT_NAME",
    ),
    "rloo_trainer/run_qwen2-7b": script("algorithm.adv_estimator=rloo", _DATA, _ACTOR, _ROLLOUT, _GROUP, _TRAINER),
}  # fmt: skip
