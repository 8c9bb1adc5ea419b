"""Rules of LoRA: what excludes adapters, and what they have no effect on."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.model import lora_targets
from headrace.job.schema.job import Job
from headrace.job.schema.training import ALL_LINEAR
from headrace.models.architecture import Architecture

NEEDS_RANK = ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_init", "lora_load")
"""Options without an effect unless lora_rank is set."""


def check_lora(job: Job) -> None:
    """Raises ConfigError for the first rule that is broken."""
    lora, train = job.lora, job.train
    if lora.lora_rank is None:
        return
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        if getattr(train, name):
            raise ConfigError(f"{name} with lora_rank: adapters alone are trained: leave one of them out", field=name)
    if lora.lora_dropout and train.true_on_policy_mode:
        raise ConfigError(
            f"true_on_policy_mode with lora_dropout {lora.lora_dropout:g}: the trained policy would differ from the "
            "engines': leave --lora-dropout out",
            field="lora_dropout",
        )
    if lora.lora_load is not None and lora.lora_init != "kaiming":
        raise ConfigError(
            f"lora_init {lora.lora_init} has no effect with lora_load, whose adapters the run begins with: leave one "
            "of them out",
            field="lora_init",
        )
    names = lora.lora_target_modules
    if not names or (ALL_LINEAR in names and len(names) > 1):
        raise ConfigError(
            f"lora_target_modules {' '.join(names) or 'is empty'}: name layers, or {ALL_LINEAR} alone",
            field="lora_target_modules",
        )


def check_lora_targets(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for layers that this model lacks, or that cannot be adapted."""
    if job.lora.lora_rank is not None:
        lora_targets(architecture, job.lora.lora_target_modules)
