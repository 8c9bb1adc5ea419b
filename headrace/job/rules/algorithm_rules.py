"""Rules of the algorithms: which options an estimator or a loss reads, and which exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.errors import ConfigError
from headrace.job.schema.job import Job

_KL_IN_REWARD = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_AGAINST_THE_GROUP = ("grpo", "gspo", "cispo")


def uses_reference(job: Job) -> bool:
    """True when a reference policy is part of the loss or of the rewards."""
    if job.train.loss_type == "sft_loss":
        return False
    return (job.train.use_kl_loss and job.train.kl_loss_coef > 0) or job.train.kl_coef > 0


def uses_critic(job: Job) -> bool:
    """True when a critic is trained beside the policy."""
    return _ppo(job) and _policy(job)


def _ppo(job: Job) -> bool:
    return job.train.advantage_estimator == "ppo"


def _kl(job: Job) -> bool:
    return job.train.use_kl_loss or job.train.kl_coef > 0


def _policy(job: Job) -> bool:
    return job.train.loss_type != "sft_loss"


ALGORITHM_NEEDS: Mapping[str, tuple[str, Callable[[Job], bool]]] = {
    "kl_loss_coef": ("use_kl_loss", lambda job: job.train.use_kl_loss),
    "use_unbiased_kl": ("use_kl_loss", lambda job: job.train.use_kl_loss),
    "kl_loss_type": ("use_kl_loss", lambda job: job.train.use_kl_loss),
    "kl_reward_type": ("kl_coef", lambda job: job.train.kl_coef > 0),
    "ref_load": ("use_kl_loss or kl_coef", _kl),
    "tis_clip": ("use_tis", lambda job: job.train.use_tis),
    "tis_clip_low": ("use_tis", lambda job: job.train.use_tis),
    "tis_mode": ("use_tis", lambda job: job.train.use_tis),
    "tis_level": ("use_tis", lambda job: job.train.use_tis),
    "tis_batch_normalize": ("use_tis", lambda job: job.train.use_tis),
    "rs_level": ("use_rs", lambda job: job.train.use_rs),
    "rs_lower_bound": ("use_rs", lambda job: job.train.use_rs),
    "rs_upper_bound": ("use_rs", lambda job: job.train.use_rs),
    "rs_veto_threshold": ("use_rs", lambda job: job.train.use_rs),
    "custom_tis_function_path": ("use_tis", lambda job: job.train.use_tis),
    "opsm_delta": ("use_opsm", lambda job: job.train.use_opsm),
    "opd_type": ("use_opd", lambda job: job.distillation.use_opd),
    "opd_kl_coef": ("use_opd", lambda job: job.distillation.use_opd),
    "opd_teacher_url": ("use_opd", lambda job: job.distillation.use_opd),
    "opd_teacher_load": ("use_opd", lambda job: job.distillation.use_opd),
}
"""An option that has no effect without another one."""

_READ_BY: Mapping[str, tuple[str, Callable[[Job], bool]]] = {
    "kl_coef": (
        f"advantage_estimator {', '.join(_KL_IN_REWARD)}; for the others put the KL into the loss with --use-kl-loss",
        lambda job: job.train.advantage_estimator in _KL_IN_REWARD,
    ),
    "gamma": (
        "advantage_estimator ppo, reinforce_plus_plus",
        lambda job: job.train.advantage_estimator in ("ppo", "reinforce_plus_plus"),
    ),
    "disable_grpo_std_normalization": (
        f"advantage_estimator {', '.join(_AGAINST_THE_GROUP)}, with their rewards normalized",
        lambda job: job.train.advantage_estimator in _AGAINST_THE_GROUP and not job.train.disable_rewards_normalization,
    ),
    "disable_rewards_normalization": (
        f"advantage_estimator {', '.join(_AGAINST_THE_GROUP)}",
        lambda job: job.train.advantage_estimator in _AGAINST_THE_GROUP,
    ),
    "eps_clip_c": ("an advantage_estimator other than cispo", lambda job: job.train.advantage_estimator != "cispo"),
    "lambd": ("advantage_estimator ppo", _ppo),
    "critic_load": ("advantage_estimator ppo", _ppo),
    "critic_lr": ("advantage_estimator ppo", _ppo),
    "critic_lr_warmup_iters": ("advantage_estimator ppo", _ppo),
    "num_critic_only_steps": ("advantage_estimator ppo", _ppo),
    "value_clip": ("advantage_estimator ppo", _ppo),
    "use_rs": ("a policy loss", lambda job: job.train.loss_type == "policy_loss"),
    "opd_teacher_url": ("opd_type sglang", lambda job: job.distillation.opd_type == "sglang"),
    "opd_teacher_load": ("opd_type megatron", lambda job: job.distillation.opd_type == "megatron"),
    "loss_mask_type": ("loss_type sft_loss", lambda job: job.train.loss_type == "sft_loss"),
    "keep_earlier_thoughts": ("a loss_mask_type", lambda job: job.train.loss_mask_type is not None),
    "normalize_advantages": ("a policy loss", _policy),
    "use_tis": ("a policy loss", lambda job: job.train.loss_type == "policy_loss"),
    "use_opsm": ("a policy loss", lambda job: job.train.loss_type == "policy_loss"),
    "use_kl_loss": ("a policy loss", lambda job: job.train.loss_type == "policy_loss"),
    "use_opd": ("a policy loss", _policy),
    "entropy_coef": ("a policy loss", lambda job: job.train.loss_type == "policy_loss"),
    "custom_pg_loss_reducer_function_path": (
        "a policy loss",
        lambda job: job.train.loss_type == "policy_loss",
    ),
    "custom_advantage_function_path": ("a policy loss", _policy),
    "custom_reward_post_process_path": ("a policy loss", _policy),
    "custom_convert_samples_to_train_data_path": ("a policy loss", _policy),
    "true_on_policy_mode": ("a policy loss", _policy),
    "custom_loss_function_path": ("loss_type custom_loss", lambda job: job.train.loss_type == "custom_loss"),
}
"""An option that only some choices read, and which."""


def check_algorithm(job: Job) -> None:
    """Raises ConfigError for an option that the chosen algorithm ignores, and for choices that exclude each other."""
    for name, (needed, is_read) in _READ_BY.items():
        if _is_set(job, name) and not is_read(job):
            raise ConfigError(
                f"{name} is only read by {needed}; this job has advantage_estimator "
                f"{job.train.advantage_estimator}, loss_type {job.train.loss_type}: leave {_flag(name)} out",
                field=name,
            )
    _losses(job)
    _kl_once(job)
    _mismatch_once(job)
    _whitening(job)
    _teacher(job)
    _true_on_policy(job)
    _conversations(job)
    _rewards_once(job)


def _losses(job: Job) -> None:
    if job.train.calculate_per_token_loss and job.train.loss_constant_length is not None:
        raise ConfigError(
            f"calculate_per_token_loss divides by the step's tokens, loss_constant_length "
            f"{job.train.loss_constant_length:g} by a fixed length: choose one",
            field="loss_constant_length",
        )
    if job.train.loss_type == "custom_loss" and job.hooks.custom_loss_function_path is None:
        raise ConfigError(
            "loss_type custom_loss needs a loss: pass --custom-loss-function-path", field="custom_loss_function_path"
        )
    for is_used, name, above, (low, high) in (
        (job.train.use_tis, "tis_clip_low", "tis_clip", job.train.weight_bounds),
        (job.train.use_rs, "rs_lower_bound", "rs_upper_bound", job.train.rejection_bounds),
    ):
        if is_used and low >= high:
            raise ConfigError(f"{name} {low:g} is not below {above} {high:g}: lower it", field=name)
    if job.train.loss_type == "sft_loss" and job.train.advantage_estimator != "grpo":
        raise ConfigError(
            f"advantage_estimator {job.train.advantage_estimator} has no effect with loss_type sft_loss: leave it out",
            field="advantage_estimator",
        )


def _kl_once(job: Job) -> None:
    if job.train.kl_coef > 0 and job.train.use_kl_loss:
        raise ConfigError(
            f"kl_coef {job.train.kl_coef:g} puts the KL into the reward and use_kl_loss (kl_loss_coef "
            f"{job.train.kl_loss_coef:g}) into the loss: it would count twice: leave one out",
            field="kl_coef",
        )


def _mismatch_once(job: Job) -> None:
    if job.train.use_tis and job.train.use_rollout_logprobs:
        raise ConfigError(
            "use_tis with use_rollout_logprobs corrects the mismatch of trainer and engine twice: the engine's "
            "log-probs in the ratio are the correction already: leave one out",
            field="use_tis",
        )


def _whitening(job: Job) -> None:
    estimator = job.train.advantage_estimator
    if estimator.startswith("reinforce_plus_plus") and not job.train.normalize_advantages:
        raise ConfigError(
            f"advantage_estimator {estimator} is defined with whitened advantages: add --normalize-advantages",
            field="normalize_advantages",
        )


def _teacher(job: Job) -> None:
    if not job.distillation.use_opd:
        return
    if job.distillation.opd_type == "megatron" and job.distillation.opd_teacher_load is None:
        raise ConfigError(
            "opd_type megatron needs a teacher: name its Hugging Face folder with --opd-teacher-load",
            field="opd_teacher_load",
        )
    if job.distillation.opd_type == "sglang" and not (
        job.distillation.opd_teacher_url
        or job.rollout.custom_generate_function_path
        or job.rollout.rollout_function_path
    ):
        raise ConfigError(
            "opd_type sglang needs a teacher: pass --opd-teacher-url http://host:port, or a custom generate function "
            "that sets sample.teacher_log_probs",
            field="opd_teacher_url",
        )

    url = job.distillation.opd_teacher_url
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"opd_teacher_url {url} is not a URL: write http://host:port", field="opd_teacher_url")
    if url is not None and job.rollout.rollout_temperature != 1.0:
        raise ConfigError(
            f"a served teacher returns log-probs at temperature 1, and rollout_temperature is "
            f"{job.rollout.rollout_temperature:g}: set it to 1, or hold the teacher with --opd-type megatron",
            field="rollout_temperature",
        )


def _true_on_policy(job: Job) -> None:
    if not job.train.true_on_policy_mode:
        return
    for name, value, wanted in (
        ("max_staleness", job.buffer.max_staleness, 0),
        ("num_steps_per_rollout", job.train.num_steps_per_rollout, 1),
        ("update_weights_interval", job.publish.update_weights_interval, 1),
        ("use_rollout_logprobs", job.train.use_rollout_logprobs, False),
        ("use_tis", job.train.use_tis, False),
        ("use_opsm", job.train.use_opsm, False),
        ("use_rs", job.train.use_rs, False),
        ("rollout_top_p", job.rollout.rollout_top_p, 1.0),
        ("rollout_top_k", job.rollout.rollout_top_k, None),
    ):
        if value != wanted:
            raise ConfigError(
                f"true_on_policy_mode needs {name} {wanted}, and it is {value}: change it, or leave "
                "--true-on-policy-mode out",
                field=name,
            )


def _conversations(job: Job) -> None:
    if job.train.loss_mask_type is None:
        return
    if job.rollout.n_samples_per_prompt != 1:
        raise ConfigError(
            f"loss_mask_type trains each conversation once, and n_samples_per_prompt is "
            f"{job.rollout.n_samples_per_prompt}: set it to 1",
            field="n_samples_per_prompt",
        )
    for name, value in (
        ("custom_generate_function_path", job.rollout.custom_generate_function_path),
        ("rollout_function_path", job.rollout.rollout_function_path),
        ("agent_function_path", job.rollout.agent_function_path),
        ("rollout_sample_hook_path", job.rollout.rollout_sample_hook_path or None),
        ("custom_rm_path", job.reward.custom_rm_path),
        ("rm_type", job.reward.rm_type),
    ):
        if value is not None:
            raise ConfigError(
                f"{name} has no effect with loss_mask_type: conversations are given, nothing is generated or scored",
                field=name,
            )


def _rewards_once(job: Job) -> None:
    hooks = job.hooks
    if hooks.custom_reward_post_process_path and hooks.custom_convert_samples_to_train_data_path:
        raise ConfigError(
            "custom_reward_post_process_path and custom_convert_samples_to_train_data_path both say what the rewards "
            "are: call the one from the other, and leave --custom-reward-post-process-path out",
            field="custom_reward_post_process_path",
        )


def _is_set(job: Job, name: str) -> bool:
    for section in (job.train, job.critic, job.distillation, job.hooks):
        fields = type(section).model_fields
        if name in fields:
            return bool(getattr(section, name) != fields[name].default)
    raise KeyError(name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
