"""Warns about flags that command lines written for slime often contain."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.devices import cpu_has_bfloat16, num_gpus
from headrace.job.megatron.arguments import OPTIMIZER_ON_GPU, megatron
from headrace.job.rules.algorithm_rules import uses_critic
from headrace.job.schema.job import Job


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
