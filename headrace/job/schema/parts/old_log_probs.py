"""Decides whether a loss needs the log-probs of the policy before the rollout step's first optimizer step."""

from __future__ import annotations

from headrace.job.schema.training import TrainSection


def trains_on_old_log_probs(train: TrainSection) -> bool:
    """True also for a custom loss, because its batch contains them."""
    return train.loss_type != "sft_loss" and not train.use_rollout_logprobs
