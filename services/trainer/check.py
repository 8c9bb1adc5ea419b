"""The trainer's part of a job, before it starts: its hooks can be loaded, and its layers can have adapters."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from headrace import devices
from headrace.errors import ConfigError
from headrace.hooks.trainer import load_trainer_hook
from headrace.job.hook_files import TRAINER_FORMS
from headrace.preflight import LOAD_SECONDS, CheckOptions, ReadPrompts, Report, hook_pool, refused_in, serve_check

_NO_ADAPTERS = "layers of Transformer Engine cannot have adapters yet"


async def check(options: CheckOptions, _: ReadPrompts) -> Report:
    """Each in a worker, so that what it imports is not our concern."""
    report = Report()
    _adapters(options, report)
    async with hook_pool(options, report) as pool:
        for kind, form in TRAINER_FORMS.items():
            path = getattr(options.job.hooks, form.option)
            if path is None:
                continue
            with refused_in(report, options):
                name = f"hook {path}"
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
