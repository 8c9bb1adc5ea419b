"""The trainer's part of a job, before it starts: its hooks can be loaded, and its layers can have adapters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec

from headrace import devices
from headrace.errors import ConfigError
from headrace.hooks.trainer import TrainerKind, load_trainer_hook
from headrace.preflight.hooks import LOAD_SECONDS, hook_pool, refused_in
from headrace.preflight.process import CheckOptions, ReadPrompts, serve_check
from headrace.preflight.report import Report

_NO_ADAPTERS = "layers of Transformer Engine cannot have adapters yet"
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
    _adapters(options, report)
    async with hook_pool(options, report) as pool:
        for option, path in options.job.hooks:
            if path is None:
                continue
            with refused_in(report, options):
                kind, name = _KINDS[option], f"hook {path}"
                await pool.run(load_trainer_hook, path, kind, timeout_seconds=LOAD_SECONDS, name=name)
                report.facts.append((kind.replace("_", " "), path))
    return report


def _adapters(options: CheckOptions, report: Report) -> None:
    """Refuses LoRA in an environment whose layers are Transformer Engine's: this process runs in the trainer's own."""
    rank = options.job.lora.lora_rank
    if rank is None or options.job.debug.debug_rollout_only:
        return
    if options.elsewhere:
        report.unchecked.append(f"{_NO_ADAPTERS}: with lora_rank {rank} it must not be installed there")
    elif devices.num_gpus() and find_spec("transformer_engine") is not None:
        report.refuse(
            ConfigError(
                f"lora_rank {rank}: {_NO_ADAPTERS}, and it is installed in the trainer's environment, {sys.prefix}: "
                "uninstall transformer-engine there, name an environment without it with --trainer-python, or leave "
                "--lora-rank out",
                field="lora_rank",
            )
        )


if __name__ == "__main__":
    serve_check(check)
