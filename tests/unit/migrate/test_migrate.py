"""What becomes of the settings of other projects' jobs. The inputs have the form of their published examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import InvalidArgument
from headrace.job.load.load import load
from headrace.job.rules.scope import scope_of_check
from headrace.job.schema.job import Job
from headrace.migrate import prime_rl, slime, trl, verl
from headrace.migrate.moved import Migration

SLIME = """#!/bin/bash
# for rerun the task
pkill -9 sglang
set -ex
export PYTHONBUFFERED=16
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/Qwen3-4B-FP8
   --ref-load /root/Qwen3-4B_torch_dist
   --save /root/Qwen3-4B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 256
   --balance-data
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
)
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 )
WANDB_ARGS=(
   # --use-wandb
   --wandb-key ${WANDB_KEY}
)
MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/\\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 8 \\
   --colocate \\
   ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} \\
   "${ROLLOUT_ARGS[@]}" \\
   ${GRPO_ARGS[@]} \\
   ${OPTIMIZER_ARGS[@]} \\
   ${WANDB_ARGS[@]}
"""

VERL = """set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=/data/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen3_8b_function_rm' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""

TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
dataset = load_dataset("trl-lib/tldr", split="train")

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

raise SystemExit("a migration runs nothing")
training_args = GRPOConfig(
    output_dir="Qwen2.5-0.5B-GRPO", learning_rate=1e-5, beta=0.04, num_generations=8, per_device_train_batch_size=8,
    gradient_accumulation_steps=4, max_completion_length=64, temperature=0.9, max_steps=100, seed=len(MODEL),
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=reward_len, args=training_args, train_dataset=dataset)
trainer.train()
"""

PRIME_RL = """
max_steps = 100
seq_len = 2048
[model]
name = "Qwen/Qwen3-0.6B"
[wandb]
project = "reverse-text"
name = "reverse-text"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 128
[[orchestrator.env]]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[inference]
"""

SOURCES: dict[str, tuple[Callable[[Path], Migration], str, str]] = {
    "slime": (slime.migrate, "run.sh", SLIME),
    "verl": (verl.migrate, "run.sh", VERL),
    "trl": (trl.migrate, "train.py", TRL),
    "prime-rl": (prime_rl.migrate, "rl.toml", PRIME_RL),
}


def migrated(tmp_path: Path, project: str, text: str | None = None) -> Migration:
    migrate, name, own = SOURCES[project]
    (tmp_path / name).write_text(own if text is None else text)
    return migrate(tmp_path / name, {}, ())


def job_of(migration: Migration) -> Job:
    return migration.job()


def test_a_script_of_slime_keeps_its_flags(tmp_path):
    migration = migrated(tmp_path, "slime")
    job = job_of(migration)
    assert job.rollout.rollout_batch_size == 32
    assert job.train.eps_clip_high == 0.28
    assert str(job.model.hf_checkpoint) == "/root/Qwen3-4B", "the line that is a comment is none"
    assert job.placement.colocate
    assert job.megatron["lr"] == 1e-6
    assert [each.source for each in migration.of("no counterpart")] == ["--wandb-key $(WANDB_KEY)"]
    assert [each.source for each in migration.of("changed")] == ["source models/qwen3-4B.sh"]


def test_slimes_asynchronous_script_is_a_staleness_of_one(tmp_path):
    migration = migrated(tmp_path, "slime", SLIME.replace("train.py", "train_async.py").replace("--colocate", ""))
    assert job_of(migration).buffer.max_staleness == 1


def test_a_script_of_verl_counts_its_mini_batches_as_steps(tmp_path):
    migration = migrated(tmp_path, "verl")
    job = job_of(migration)
    assert (job.rollout.rollout_batch_size, job.train.num_steps_per_rollout) == (1024, 4)
    assert job.rollout.n_samples_per_prompt == 5
    assert job.eval.eval_prompt_data[0][0] == "test"
    assert job.checkpoint.save_interval == 20
    dropped = [each.source.partition("=")[0] for each in migration.of("no counterpart")]
    assert "data.train_files" in dropped, "HOME is what the script's machine says"
    assert "actor_rollout_ref.actor.fsdp_config.param_offload" in dropped


def test_a_script_of_trl_is_read_and_not_run(tmp_path):
    migration = migrated(tmp_path, "trl")
    job = job_of(migration)
    assert str(job.model.hf_checkpoint) == "Qwen/Qwen2.5-0.5B-Instruct"
    assert job.rollout.rollout_batch_size == 4, "8 samples x 4 steps are 4 prompts of 8 samples"
    assert job.train.kl_loss_coef == 0.04
    assert job.reward.custom_rm_path == "train.py:reward_len"
    assert "GRPOConfig(seed=…)" in [each.source for each in migration.of("no counterpart")], "it is computed"


def test_prime_rls_batch_is_counted_in_prompts(tmp_path):
    migration = migrated(tmp_path, "prime-rl")
    job = job_of(migration)
    assert (job.rollout.rollout_batch_size, job.rollout.n_samples_per_prompt) == (8, 16)
    assert [each.source for each in migration.of("no counterpart")] == ["orchestrator.env = [{'id': 'reverse-text'}]"]


@pytest.mark.parametrize("project", ["slime"])
def test_the_rules_take_the_job_that_comes_of_it(tmp_path, project):
    migration = migrated(tmp_path, project)
    (tmp_path / "job.toml").write_text(migration.toml())
    job = load(tmp_path / "job.toml", (), {}, lambda job: scope_of_check(job, elsewhere=True))
    assert job.rollout.num_rollout == 3000


@pytest.mark.parametrize("project", SOURCES)
def test_another_file_is_refused(tmp_path, project):
    with pytest.raises(InvalidArgument):
        migrated(tmp_path, project, "print(1)\n")
