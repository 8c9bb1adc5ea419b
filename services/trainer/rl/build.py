"""The parts of the mathematics as a job wants them. Only this module of the folder reads a whole job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from services.trainer.megatron.parallel import Layout
from services.trainer.rl.advantages import Advantages
from services.trainer.rl.corrections import custom_correction
from services.trainer.rl.custom_loss import CustomLoss, PolicyReducer
from services.trainer.rl.hooks import BeforeLogProb, BeforeTrainStep, RolloutDataHook, load_advantage_hook
from services.trainer.rl.objective import Objective
from services.trainer.rl.whole_batch import WholeBatchHooks


def objective_of(job: Job) -> Objective:
    """The job's loss. Raises ConfigError for a user's function that cannot be called as the trainer calls it."""
    hooks, args, reducer = job.hooks, hook_args(job), job.hooks.custom_pg_loss_reducer_function_path
    loss, correction = hooks.custom_loss_function_path, hooks.custom_tis_function_path
    return Objective(
        job.train,
        custom_loss=CustomLoss(loss, args) if loss and job.train.loss_type == "custom_loss" else None,
        custom_correction=custom_correction(correction, args) if correction and job.train.use_tis else None,
        reducer=PolicyReducer(reducer, per_token=job.train.calculate_per_token_loss) if reducer else None,
    )


def advantages_of(job: Job, group: dist.ProcessGroup | None) -> Advantages:
    """The job's estimator. `group`: the data-parallel ranks that whiten together."""
    path = job.hooks.custom_advantage_function_path
    return Advantages(
        job.train,
        group,
        hook=load_advantage_hook(path, hook_args(job)) if path else None,
        distillation=job.distillation.opd_kl_coef if job.distillation.use_opd else None,
    )


def whole_batch_hooks_of(job: Job, layout: Layout) -> WholeBatchHooks | None:
    """The user's functions that see all samples of a step; None without any."""
    hooks = job.hooks
    paths = {
        "sample_filter": hooks.rollout_sample_filter_path,
        "train_data": hooks.custom_convert_samples_to_train_data_path,
        "reward_post_process": hooks.custom_reward_post_process_path,
        "rollout_log": hooks.custom_rollout_log_function_path,
    }
    return WholeBatchHooks(layout, hook_args(job), **paths) if any(paths.values()) else None


def rollout_data_hook_of(job: Job) -> RolloutDataHook | None:
    """A user's look at a step's data before it is trained; None without."""
    path = job.hooks.rollout_data_postprocess_path
    return RolloutDataHook(path, hook_args(job)) if path else None


def before_train_step_of(job: Job) -> BeforeTrainStep | None:
    """A user's function before each optimizer step; None without."""
    path = job.hooks.custom_megatron_before_train_step_hook_path
    return BeforeTrainStep(path, hook_args(job)) if path else None


def before_log_prob_of(job: Job, model: Any) -> BeforeLogProb | None:
    """A user's function before each pass for log-probs; None without."""
    path = job.hooks.custom_megatron_before_log_prob_hook_path
    return BeforeLogProb(path, hook_args(job), model) if path else None
