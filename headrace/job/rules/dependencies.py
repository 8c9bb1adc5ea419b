"""Refuses an option that has no effect because another one is not set."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.errors import ConfigError
from headrace.job.option import options
from headrace.job.rules.algorithm_rules import ALGORITHM_NEEDS, uses_reference
from headrace.job.rules.lora_rules import NEEDS_RANK
from headrace.job.schema.job import Job

_OF_EVALUATIONS = (
    "eval_function_path",
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "skip_eval_before_train",
    "eval_max_response_len",
    "eval_min_new_tokens",
    "eval_max_prompt_len",
    "eval_max_context_len",
    "eval_input_key",
    "eval_label_key",
    "eval_tool_key",
    "eval_reward_key",
    "eval_exact_version",
    "eval_samples_in_flight",
    "eval_timeout_seconds",
)

_NEEDS: Mapping[str, tuple[str, Callable[[Job], bool]]] = {
    **ALGORITHM_NEEDS,
    **{name: ("lora_rank", lambda job: job.lora.lora_rank is not None) for name in NEEDS_RANK},
    **{name: ("eval_prompt_data", lambda job: job.eval.is_asked_for) for name in _OF_EVALUATIONS},
    "custom_eval_rollout_log_function_path": ("eval_prompt_data", lambda job: job.eval.is_asked_for),
    "max_tokens_per_gpu": ("use_dynamic_batch_size", lambda job: job.train.use_dynamic_batch_size),
    "balance_by": ("balance_data", lambda job: job.train.balance_data),
    "buffer_postgres": ("buffer_store", lambda job: job.buffer.buffer_store == "postgres"),
    "buffer_shard": ("buffer_addresses", lambda job: bool(job.buffer.buffer_addresses)),
    "rollout_service": ("rollout_address", lambda job: job.services.rollout_address is not None),
    "offload_train": ("colocate", lambda job: job.placement.colocate),
    "offload_rollout": ("colocate", lambda job: job.placement.colocate),
    "update_weight_disk_path": (
        "update_weight_transport",
        lambda job: job.publish.update_weight_transport == "disk",
    ),
    "ref_update_interval": ("kl_loss_coef or kl_coef", uses_reference),
    "keep_best_metric": ("keep_best", lambda job: job.checkpoint.keep_best > 0),
    "group_rm": ("custom_rm_path", lambda job: job.reward.custom_rm_path is not None),
    "judge_model": ("judge_url", lambda job: job.reward.judge_url is not None),
    "judge_prompt": ("judge_url", lambda job: job.reward.judge_url is not None),
    "judge_scale": ("judge_url", lambda job: job.reward.judge_url is not None),
    "judge_json": ("judge_url", lambda job: job.reward.judge_url is not None),
    "rollout_timeout_seconds": (
        "rollout_function_path",
        lambda job: job.rollout.rollout_function_path is not None,
    ),
    "max_turns": ("custom_generate_function_path or agent_function_path", lambda job: bool(job.rollout.user_function)),
    "agent_hosts": ("agent_function_path", lambda job: job.rollout.agent_function_path is not None),
    "openai_host": (
        "openai_port or agent_function_path",
        lambda job: bool(job.rollout.openai_port or job.rollout.agent_function_path),
    ),
    "generate_per_sample": (
        "custom_generate_function_path",
        lambda job: bool(job.rollout.custom_generate_function_path or job.eval.eval_config),
    ),
    "rollout_shuffle": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "num_epoch": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "multimodal_keys": ("prompt_data", lambda job: bool(job.data.prompt_data or job.eval.is_asked_for)),
    "prompt_data_weights": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "streaming_data": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "mask_offpolicy_in_partial_rollout": ("partial_rollout", lambda job: job.rollout.partial_rollout),
    "num_data_workers": ("streaming_data", lambda job: job.data.streaming_data),
    "samples_per_insert": ("min_size_to_sample", lambda job: job.buffer.min_size_to_sample is not None),
    "samples_per_insert_error_buffer": ("samples_per_insert", lambda job: job.buffer.samples_per_insert is not None),
    "wandb_project": ("use_wandb", lambda job: job.tracking.use_wandb),
    "wandb_group": ("use_wandb", lambda job: job.tracking.use_wandb),
    "wandb_team": ("use_wandb", lambda job: job.tracking.use_wandb),
    "wandb_mode": ("use_wandb", lambda job: job.tracking.use_wandb),
    "skip_bad_lines": ("prompt_data", lambda job: bool(job.data.prompt_data)),
}
"""An option that has no effect without another one."""


def check_dependencies(job: Job) -> None:
    """Raises ConfigError for an option that is set and would be ignored."""
    known = options()
    for name, (needed, has_it) in _NEEDS.items():
        section = getattr(job, known[name].section)
        if getattr(section, name) != known[name].default and not has_it(job):
            flags = " or ".join(known[each].flag for each in needed.split(" or "))
            raise ConfigError(
                f"{name} has no effect without {needed}: add {flags} or leave {known[name].flag} out", field=name
            )
    if job.rollout.rollout_sample_hook_path and job.rollout.rollout_function_path:
        raise ConfigError(
            "rollout_sample_hook_path has no effect with rollout_function_path, which returns finished samples: call "
            "the hook there, or leave one of them out",
            field="rollout_sample_hook_path",
        )
