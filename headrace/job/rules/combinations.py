"""Which options need, and which exclude each other: a line each, read by one rule.

A condition is an option's name, which says that it has a value or is on, or `name=a,b`, which says that it has one of
these values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.job.algorithms import ALGORITHMS, options_of_some, readers
from headrace.job.option import options
from headrace.job.schema.job import Job

_POLICY_LOSS = "loss_type=policy_loss"
_NO_SFT = "loss_type=policy_loss,custom_loss"

_ACTS_WITH: Sequence[tuple[str, str]] = (
    *((f"advantage_estimator={','.join(readers(name))}", name) for name in options_of_some()),
    ("use_kl_loss", "kl_loss_coef use_unbiased_kl kl_loss_type"),
    ("kl_coef", "kl_reward_type"),
    ("use_kl_loss or kl_coef", "ref_load"),
    ("kl_loss_coef or kl_coef", "ref_update_interval"),
    ("use_tis", "tis_clip tis_clip_low tis_mode tis_level tis_batch_normalize custom_tis_function_path"),
    ("use_rs", "rs_level rs_lower_bound rs_upper_bound rs_veto_threshold"),
    ("use_opsm", "opsm_delta"),
    ("use_opd", "opd_type opd_kl_coef opd_teacher_url opd_teacher_load"),
    ("opd_type=sglang", "opd_teacher_url"),
    ("opd_type=megatron", "opd_teacher_load"),
    (
        _POLICY_LOSS,
        "use_tis use_rs use_opsm use_kl_loss entropy_coef custom_pg_loss_reducer_function_path keep_sampling_mask",
    ),
    (
        _NO_SFT,
        "normalize_advantages use_opd true_on_policy_mode custom_advantage_function_path "
        "custom_reward_post_process_path custom_convert_samples_to_train_data_path advantage_estimator keep_old_actor",
    ),
    ("loss_type=custom_loss", "custom_loss_function_path"),
    ("loss_type=sft_loss", "loss_mask_type"),
    ("loss_mask_type", "keep_earlier_thoughts"),
    ("lora_rank", "lora_alpha lora_use_rslora lora_dropout lora_target_modules lora_init lora_load"),
    (
        "eval_prompt_data or eval_config",
        "eval_function_path n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k skip_eval_before_train "
        "eval_max_response_len eval_min_new_tokens eval_max_prompt_len eval_max_context_len eval_input_key "
        "eval_label_key eval_tool_key eval_reward_key eval_exact_version eval_samples_in_flight "
        "custom_eval_rollout_log_function_path",
    ),
    ("use_dynamic_batch_size", "max_tokens_per_gpu"),
    ("buffer_store=postgres", "buffer_postgres"),
    ("buffer_address", "buffer_shard"),
    ("rollout_address", "rollout_service"),
    ("colocate", "offload_train offload_rollout"),
    ("update_weight_transport=disk or update_weight_transport=adapter", "update_weight_disk_path"),
    ("update_weight_transport=collective or update_weight_transport=disk", "update_weight_delta"),
    ("keep_best", "keep_best_metric"),
    ("custom_rm_path", "group_rm"),
    ("reward_parts", "reward_combine reward_clip"),
    ("judge_url", "judge_model judge_prompt judge_scale judge_json"),
    ("custom_generate_function_path or agent_function_path or rollout_function_path", "max_turns"),
    ("agent_function_path", "agent_hosts"),
    ("agent_command", "agent_reward_command"),
    ("openai_port or agent_function_path", "openai_host"),
    ("tinker_port", "tinker_host tinker_models tinker_model_name"),
    ("custom_generate_function_path or eval_config", "generate_per_sample"),
    ("prompt_data", "rollout_shuffle num_epoch prompt_data_weights streaming_data skip_bad_lines"),
    ("prompt_data or eval_prompt_data or eval_config", "multimodal_keys"),
    ("partial_rollout", "mask_offpolicy_in_partial_rollout"),
    ("streaming_data", "num_data_workers"),
    ("min_size_to_sample", "samples_per_insert"),
    ("use_wandb", "wandb_project wandb_group wandb_team wandb_mode"),
    ("use_trackio", "trackio_project"),
)
"""(condition, the options that act only with it)"""

_HINTS = {"kl_coef": ", or put the KL into the loss with --use-kl-loss"}

_NEEDS: Sequence[tuple[str, str, str]] = (
    *(
        (f"advantage_estimator={spec.name}", need, "the estimator is defined with it")
        for spec in ALGORITHMS.values()
        for need in spec.needs
    ),
    ("use_dynamic_batch_size", "max_tokens_per_gpu", "micro-batches are filled up to it"),
    ("loss_type=custom_loss", "custom_loss_function_path", "it is the loss"),
    ("opd_type=megatron", "opd_teacher_load", "the teacher's Hugging Face folder"),
    (
        "use_opd",
        "opd_teacher_url or opd_teacher_load or custom_generate_function_path or rollout_function_path",
        "opd_type sglang asks a teacher at http://host:port, or a function sets sample.teacher_log_probs",
    ),
    ("buffer_store=postgres", "buffer_postgres", "postgresql://USER@HOST/NAME"),
    ("update_weight_transport=adapter", "lora_rank", "it sends the adapters of LoRA alone"),
    (
        "debug_train_only",
        "load_debug_rollout_data",
        "the steps of an earlier run, kept with --save-debug-rollout-data",
    ),
)
"""(condition, what must be given then, why)"""

_EXCLUDES: Sequence[tuple[str, str, str]] = (
    ("agent_function_path", "custom_generate_function_path rollout_function_path", "both make the samples"),
    ("agent_function_path", "partial_rollout", "an agent's run cannot be continued from its tokens"),
    ("agent_function_path", "use_rollout_routing_replay", "the experts of a session's requests are not recorded"),
    ("agent_function_path", "multimodal_keys", "its OpenAI-compatible endpoint takes text"),
    ("reward_parts", "custom_rm_path rm_type reward_key", "each part names its scorer, and its key"),
    ("loss_mask_type", "multimodal_keys", "conversations that are trained as they are given are text"),
    (
        "loss_mask_type",
        "custom_generate_function_path rollout_function_path agent_function_path rollout_sample_hook_path "
        "custom_rm_path rm_type reward_parts",
        "conversations are given, nothing is generated or scored",
    ),
    ("lora_rank", "only_train_params_name_list freeze_params_name_list", "adapters alone are trained"),
    ("true_on_policy_mode", "lora_dropout", "the trained policy would differ from the engines'"),
    ("keep_sampling_mask", "use_opd", "a teacher's log-probs are of the whole vocabulary"),
    ("debug_rollout_only", "profile_steps", "nothing is trained"),
    ("lora_load", "lora_init", "its adapters are those that the run begins with"),
    ("use_dynamic_batch_size", "micro_batch_size", "it has no effect, max_tokens_per_gpu decides"),
    ("only_train_params_name_list", "freeze_params_name_list", "they set the same thing"),
    ("calculate_per_token_loss", "loss_constant_length", "one divides by the step's tokens, one by a fixed length"),
    ("use_kl_loss", "kl_coef", "one puts the KL into the loss, one into the reward: it would count twice"),
    (
        "use_rollout_logprobs",
        "use_tis",
        "the mismatch of trainer and engine is corrected twice: the engine's log-probs in the ratio correct it",
    ),
    ("use_rollout_logprobs", "keep_old_actor", "the loss does not use the old policy's log-probs"),
    ("max_staleness=0", "keep_old_actor", "every sample comes from the current policy: it has no effect"),
    (
        "disable_rewards_normalization",
        "disable_grpo_std_normalization",
        "rewards that are not normalized are not divided",
    ),
    (
        "custom_convert_samples_to_train_data_path",
        "custom_reward_post_process_path",
        "both say what the rewards are: call the one from the other",
    ),
    ("rollout_function_path", "rollout_sample_hook_path", "it returns finished samples: call the hook there"),
    ("data_source_path", "prompt_data_weights streaming_data", "it draws from its dataset itself"),
    ("buffer_filter_path", "selection", "it chooses the batches"),
    ("load_debug_rollout_data", "debug_rollout_only", "one trains on what was generated, one generates"),
    ("load_debug_rollout_data", "save_debug_rollout_data", "it would keep again what is read"),
    (
        "rollout_external_engine_addrs",
        "engine_groups rollout_max_engines",
        "engines that are started elsewhere have their number and arguments there",
    ),
    ("rollout_placement=ray", "rollout_external_engine_addrs", "those engines are started elsewhere"),
    ("rollout_placement=slurm", "rollout_external_engine_addrs", "those engines are started elsewhere"),
    ("colocate", "update_weight_delta", "engines give up their memory, and with it the weights that it changes"),
    (
        "rollout_external_engine_addrs",
        "update_weight_delta",
        "only engines that are started here are known to have the plugin that reads it",
    ),
    (
        "tinker_port",
        "prompt_data data_source_path eval_prompt_data eval_config rollout_function_path agent_function_path "
        "custom_generate_function_path loss_mask_type critic_load save_hf initial_megatron_checkpoint load "
        "debug_rollout_only debug_train_only load_debug_rollout_data use_opd",
        "clients say what is generated, trained and saved",
    ),
    (
        "tinker_port",
        "lora_alpha lora_use_rslora lora_dropout lora_init lora_load",
        "clients make their models, with an alpha of 32",
    ),
    ("rollout_external_engine_addrs", "debug_rollout_only", "nothing would give them hf_checkpoint's weights"),
    (
        "rollout_external_engine_addrs",
        "use_rollout_routing_replay",
        "only engines that are started here are known to return experts",
    ),
)
"""(condition, options that contradict it, why)"""


def check_combinations(job: Job) -> None:
    """Raises ConfigError for an option that would be ignored, that lacks another one, or that contradicts one."""
    for message in (*_contradictions(job), *_ignored(job), *_lacking(job)):
        raise ConfigError(message)


def _ignored(job: Job) -> Iterator[str]:
    for needed, names in _ACTS_WITH:
        conditions = needed.split(" or ")
        if any(_holds(job, condition) for condition in conditions):
            continue
        for name in names.split():
            if _is_given(job, name):
                shown = " or ".join(_words(condition) for condition in conditions)
                ways = " or ".join(_flag(condition) for condition in conditions)
                ways += _HINTS.get(name, "")
                yield f"{name} has no effect without {shown}: add {ways} or leave {_flag(name)} out"


def _lacking(job: Job) -> Iterator[str]:
    for condition, needed, why in _NEEDS:
        names = needed.split(" or ")
        if _holds(job, condition) and not any(_holds(job, name) for name in names):
            ways = " or ".join(_flag(name) for name in names)
            yield f"{_words(condition)} needs {' or '.join(names)} ({why}): pass {ways}"


def _contradictions(job: Job) -> Iterator[str]:
    for condition, names, why in _EXCLUDES:
        if not _holds(job, condition):
            continue
        for name in names.split():
            if _is_given(job, name):
                yield f"{_shown(job, name)} with {_words(condition)}: {why}; leave one of them out"


def _value(job: Job, name: str) -> Any:
    return getattr(getattr(job, options()[name].section), name)


def _is_given(job: Job, name: str) -> bool:
    return bool(_value(job, name) != options()[name].default)


def _holds(job: Job, condition: str) -> bool:
    name, equals, values = condition.partition("=")
    return str(_value(job, name)) in values.split(",") if equals else bool(_value(job, name))


def _words(condition: str) -> str:
    return condition.replace("=", " ").replace(",", ", ")


def _flag(condition: str) -> str:
    name, _, values = condition.partition("=")
    return f"{options()[name].flag} {values.replace(',', ' or ')}".rstrip()


def _shown(job: Job, name: str) -> str:
    value = _value(job, name)
    match value:
        case (str(), *_):
            return f"{name} {' '.join(value)}"
        case bool() | dict() | tuple():
            return name
        case float():
            return f"{name} {value:g}"
    return f"{name} {value}"
