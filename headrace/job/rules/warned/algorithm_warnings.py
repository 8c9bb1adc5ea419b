"""Warns of options that an algorithm allows and that are probably a mistake."""

from __future__ import annotations

from headrace.job.schema.job import Job

_COMPARES_SAMPLES = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")


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
    if train.advantage_estimator not in _COMPARES_SAMPLES or job.rollout.user_function:
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
