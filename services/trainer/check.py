"""The trainer's part of a job, before it starts: its hooks can be loaded, and take what they will be given."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.hooks.trainer import TrainerKind, load_trainer_hook
from headrace.preflight.hooks import LOAD_SECONDS, hook_pool, refused_in
from headrace.preflight.process import CheckOptions, ReadPrompts, serve_check
from headrace.preflight.report import Report

_KINDS: Mapping[str, TrainerKind] = {
    "custom_reward_post_process_path": "reward_post_process",
    "rollout_sample_filter_path": "sample_filter",
    "custom_convert_samples_to_train_data_path": "train_data",
    "custom_rollout_log_function_path": "rollout_log",
    "custom_eval_rollout_log_function_path": "eval_log",
    "custom_advantage_function_path": "advantage",
    "rollout_data_postprocess_path": "rollout_data",
    "custom_loss_function_path": "loss",
    "custom_tis_function_path": "tis",
    "custom_pg_loss_reducer_function_path": "reducer",
    "custom_megatron_init_path": "megatron_init",
    "custom_model_provider_path": "model_provider",
    "custom_megatron_before_log_prob_hook_path": "before_log_prob",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
}


async def check(options: CheckOptions, _: ReadPrompts) -> Report:
    """Each in a worker, so that what it imports is not our concern."""
    report = Report()
    async with hook_pool(options, report) as pool:
        for option, path in options.job.hooks:
            if path is None:
                continue
            with refused_in(report, options):
                kind, name = _KINDS[option], f"hook {path}"
                await pool.run(load_trainer_hook, path, kind, timeout_seconds=LOAD_SECONDS, name=name)
                report.facts.append((kind.replace("_", " "), path))
    return report


if __name__ == "__main__":
    serve_check(check)
