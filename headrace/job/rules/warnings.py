"""Settings that are allowed and probably not intended: `headrace check` and `headrace train` warn and continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.devices import cpu_has_bfloat16, num_gpus
from headrace.job.algorithms import ALGORITHMS
from headrace.job.megatron.arguments import OPTIMIZER_ON_GPU, megatron
from headrace.job.rules.training import uses_critic
from headrace.job.schema.job import Job


def algorithm_warnings(job: Job) -> list[str]:
    """None for supervised fine-tuning, which samples nothing."""
    if job.train.loss_type == "sft_loss":
        return []
    return [*_narrowed_sampling(job), *_lone_samples(job), *_greedy(job)]


def _narrowed_sampling(job: Job) -> list[str]:
    """Warns about top-p and top-k, which true on-policy mode refuses."""
    top_p, top_k = job.rollout.rollout_top_p, job.rollout.rollout_top_k
    given = [f"rollout_top_p {top_p:g}"] if top_p < 1 else []
    given += [] if top_k is None else [f"rollout_top_k {top_k}"]
    if not given:
        return []
    return [
        f"{' and '.join(given)}: engines sample from fewer tokens than the recorded log-probs cover, so the policy "
        "that generated the samples is not the one that the loss corrects for: train with rollout_top_p 1 and no "
        "rollout_top_k"
    ]


def _lone_samples(job: Job) -> list[str]:
    train, hooks = job.train, job.hooks
    replaced = hooks.custom_reward_post_process_path or hooks.custom_advantage_function_path
    if job.rollout.n_samples_per_prompt != 1 or train.disable_rewards_normalization or replaced:
        return []
    if not ALGORITHMS[train.advantage_estimator].compares_group or job.rollout.user_function:
        return []
    return [
        f"advantage_estimator {train.advantage_estimator} compares the samples of a prompt, and n_samples_per_prompt "
        "is 1: every advantage is 0 and nothing is learned: raise n_samples_per_prompt"
    ]


def _greedy(job: Job) -> list[str]:
    if job.rollout.rollout_temperature > 0:
        return []
    return [
        "rollout_temperature 0: all samples of a prompt are the same greedy response, so none is better than another: "
        "train with a temperature of about 1"
    ]


def sequence_parallel_alone(job: Job) -> Sequence[str]:
    """Warns that sequence parallelism needs more than one tensor rank."""
    args = megatron(job.megatron)
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        return ["sequence_parallel has no effect with tensor_model_parallel_size 1 and is turned off"]
    return []


def evaluates_nothing(job: Job) -> Sequence[str]:
    """Warns that an interval of evaluations needs something to evaluate."""
    if job.eval.eval_interval is not None and not job.eval.is_asked_for:
        return [f"eval_interval {job.eval.eval_interval} has no effect without eval_prompt_data: nothing is evaluated"]
    return []


def begins_anew(job: Job) -> Sequence[str]:
    """Warns that a missing folder to resume from starts a new run."""
    folder = job.checkpoint.load
    if folder is not None and not folder.exists():
        return [f"load {folder} does not exist yet: training starts from the beginning, with hf_checkpoint's weights"]
    return []


def acts_on_gpus_alone(job: Job) -> Sequence[str]:
    """Warns about a place for the optimizer's states that only a machine with GPUs has."""
    given = megatron(job.megatron).given(OPTIMIZER_ON_GPU)
    if not given or num_gpus():
        return []
    return [f"{', '.join(given)}: without effect on this machine, which has no GPU"]


def slow_bfloat16(job: Job) -> Sequence[str]:
    """Warns that a CPU without instructions for bfloat16 converts every number."""
    if not megatron(job.megatron).bf16 or num_gpus() or cpu_has_bfloat16():
        return []
    return [
        "bf16 on this machine is slower than float32: it has no GPU, and its CPU has no instructions for bfloat16 "
        "(avx512_bf16 or amx_bf16): leave --bf16 out to train here"
    ]


def learns_nothing(job: Job) -> Sequence[str]:
    """Warns about learning rates of 0, with which weights stay as they are."""
    if job.debug.debug_rollout_only:
        return []
    rates = {"lr": ("policy", megatron(job.megatron).lr)}
    if uses_critic(job):
        rates["critic_lr"] = ("critic", job.critic.critic_lr)
    return [
        f"{name} 0: the {whose} never changes: pass --{name.replace('_', '-')} 1e-6 or another learning rate"
        for name, (whose, rate) in rates.items()
        if rate == 0
    ]


def debug_warnings(job: Job) -> Sequence[str]:
    """Says which part of the job is left out."""
    if job.debug.trains_alone and job.eval.is_asked_for:
        return ["nothing is evaluated: load_debug_rollout_data trains without engines"]
    if job.debug.debug_rollout_only and job.checkpoint.save_hf is not None:
        return ["nothing is exported to save_hf: debug_rollout_only trains nothing"]
    return []


WARNINGS: Sequence[Callable[[Job], Sequence[str]]] = (
    sequence_parallel_alone,
    begins_anew,
    evaluates_nothing,
    learns_nothing,
    slow_bfloat16,
    acts_on_gpus_alone,
    algorithm_warnings,
    debug_warnings,
)
"""Each answers sentences that say what will happen and what to set; nothing where all is well."""


def warnings(job: Job) -> list[str]:
    """All warnings for a resolved job."""
    return [sentence for rule in WARNINGS for sentence in rule(job)]
