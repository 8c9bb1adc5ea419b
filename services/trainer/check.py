"""The trainer's part of a job, before it starts: its hooks can be loaded, and take what they will be given."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import ConfigError
from headrace.hooks.trainer import TrainerKind, load_trainer_hook
from headrace.preflight.process import CheckOptions, serve_check
from headrace.preflight.report import Prompts, Report
from headrace.process.workers import WorkerError, WorkerPool

_LOAD_SECONDS = 120.0
_KINDS: Mapping[str, TrainerKind] = {
    "custom_reward_post_process_path": "reward_post_process",
    "custom_advantage_function_path": "advantage",
    "rollout_data_postprocess_path": "rollout_data",
    "custom_loss_function_path": "loss",
    "custom_tis_function_path": "tis",
    "custom_pg_loss_reducer_function_path": "reducer",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
}


async def check(options: CheckOptions, _: Prompts) -> Report:
    """Each in a worker, so that what it imports is not our concern."""
    report, pool = Report(), WorkerPool(1)
    try:
        for leaf, path in options.job.hooks:
            if path is None:
                continue
            try:
                name = f"hook {path}"
                await pool.run(load_trainer_hook, path, _KINDS[leaf], timeout_seconds=_LOAD_SECONDS, name=name)
                report.facts.append((_KINDS[leaf].replace("_", " "), path))
            except WorkerError as error:
                report.refuse(ConfigError(error.message), elsewhere=options.elsewhere)
    finally:
        await pool.close()
    return report


if __name__ == "__main__":
    serve_check(check)
