"""Settings that are allowed and probably not intended: `headrace check` and `headrace train` warn and continue."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.devices import cpu_has_bfloat16, num_gpus
from headrace.job.algorithms import ALGORITHMS
from headrace.job.megatron.arguments import OPTIMIZER_ON_GPU, megatron
from headrace.job.rules.training import uses_critic
from headrace.job.schema.job import Job


def warnings(job: Job) -> list[str]:
    """Sentences about a resolved job that say what will happen and what to set."""
    return [*_of_training(job), *_of_the_machine(job), *algorithm_warnings(job), *_of_parts(job)]


def algorithm_warnings(job: Job) -> list[str]:
    """None for supervised fine-tuning, which samples nothing."""
    return [] if job.train.loss_type == "sft_loss" else list(_of_sampling(job))


def _of_training(job: Job) -> Iterator[str]:
    args, folder = megatron(job.megatron), job.checkpoint.load
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "sequence_parallel has no effect with tensor_model_parallel_size 1 and is turned off"
    if folder is not None and not folder.exists():
        yield f"load {folder} does not exist yet: training starts from the beginning, with hf_checkpoint's weights"
    if job.eval.eval_interval is not None and not job.eval.is_asked_for:
        yield f"eval_interval {job.eval.eval_interval} has no effect without eval_prompt_data: nothing is evaluated"
    if not job.debug.debug_rollout_only:
        if args.lr == 0:
            yield "lr 0: the policy never changes: pass --lr 1e-6 or another learning rate"
        if uses_critic(job) and job.critic.critic_lr == 0:
            yield "critic_lr 0: the critic never changes: pass --critic-lr 1e-6 or another learning rate"


def _of_the_machine(job: Job) -> Iterator[str]:
    if num_gpus():
        return
    args = megatron(job.megatron)
    if args.bf16 and not cpu_has_bfloat16():
        yield (
            "bf16 on this machine is slower than float32: it has no GPU, and its CPU has no instructions for bfloat16 "
            "(avx512_bf16 or amx_bf16): leave --bf16 out to train here"
        )
    if given := args.given(OPTIMIZER_ON_GPU):
        yield f"{', '.join(given)}: without effect on this machine, which has no GPU"


def _of_sampling(job: Job) -> Iterator[str]:
    train, rollout, hooks = job.train, job.rollout, job.hooks
    narrowed = [f"rollout_top_p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p < 1 else []
    narrowed += [] if rollout.rollout_top_k is None else [f"rollout_top_k {rollout.rollout_top_k}"]
    if narrowed and not train.keep_sampling_mask:
        yield (
            f"{' and '.join(narrowed)}: engines sample from fewer tokens than the recorded log-probs cover, so the "
            "policy that generated the samples is not the one that the loss corrects for: pass --keep-sampling-mask, "
            "or train with rollout_top_p 1 and no rollout_top_k"
        )
    replaced = hooks.custom_reward_post_process_path or hooks.custom_advantage_function_path or rollout.user_function
    compares = ALGORITHMS[train.advantage_estimator].compares_group and not train.disable_rewards_normalization
    if rollout.n_samples_per_prompt == 1 and compares and not replaced:
        yield (
            f"advantage_estimator {train.advantage_estimator} compares the samples of a prompt, and "
            "n_samples_per_prompt is 1: every advantage is 0 and nothing is learned: raise n_samples_per_prompt"
        )
    if rollout.rollout_temperature == 0:
        yield (
            "rollout_temperature 0: all samples of a prompt are the same greedy response, so none is better than "
            "another: train with a temperature of about 1"
        )


def _of_parts(job: Job) -> Iterator[str]:
    """Says which part of the job is left out."""
    if job.debug.trains_alone and job.eval.is_asked_for:
        yield "nothing is evaluated: load_debug_rollout_data trains without engines"
    if job.debug.debug_rollout_only and job.checkpoint.save_hf is not None:
        yield "nothing is exported to save_hf: debug_rollout_only trains nothing"
