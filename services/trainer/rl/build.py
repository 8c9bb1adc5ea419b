"""The parts of the mathematics as a job wants them. Only this module of the folder reads a whole job."""

from __future__ import annotations

import torch.distributed as dist

from headrace.hooks import hook_args
from headrace.job.schema.job import Job
from services.trainer.megatron.parallel import Layout
from services.trainer.rl.advantages import Advantages
from services.trainer.rl.corrections import custom_correction
from services.trainer.rl.custom_loss import CustomLoss, PolicyReducer
from services.trainer.rl.hooks import BeforeTrainStep, RolloutDataHook, load_advantage_hook
from services.trainer.rl.objective import Objective
from services.trainer.rl.rewards import RewardPostProcess


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


def reward_post_process_of(job: Job, layout: Layout) -> RewardPostProcess | None:
    """A user's rewards in the place of the estimator's; None without."""
    path = job.hooks.custom_reward_post_process_path
    return RewardPostProcess(path, hook_args(job), layout) if path else None


def rollout_data_hook_of(job: Job) -> RolloutDataHook | None:
    """A user's look at a step's data before it is trained; None without."""
    path = job.hooks.rollout_data_postprocess_path
    return RolloutDataHook(path, hook_args(job)) if path else None


def before_train_step_of(job: Job) -> BeforeTrainStep | None:
    """A user's function before each optimizer step; None without."""
    path = job.hooks.custom_megatron_before_train_step_hook_path
    return BeforeTrainStep(path, hook_args(job)) if path else None
