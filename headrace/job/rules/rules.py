"""The rules over several options, in one order. Each message names the contradicting values and what to change."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.job.megatron.arguments import megatron
from headrace.job.model import check_adapters, check_layout, check_served_adapters, contradictions, virtual_stages
from headrace.job.rules.combinations import check_combinations
from headrace.job.rules.files import check_files, check_folders, check_passwords, check_remote_code
from headrace.job.rules.machines import (
    check_colocation,
    check_meeting,
    check_metrics_port,
    check_nodes,
    check_service_host,
    check_services,
    check_transport,
    device_plan,
)
from headrace.job.rules.production import (
    check_engine_machines,
    check_engine_model,
    check_engine_ranks,
    check_images,
    check_lengths,
    check_production,
)
from headrace.job.rules.scope import Scope
from headrace.job.rules.training import (
    check_routing_replay,
    check_training,
    require_gpus,
    require_states_that_are_saved,
)
from headrace.job.schema.job import Job
from headrace.models.architecture import Architecture
from headrace.models.registry import architecture, differences, find, read_architecture


def check(job: Job, scope: Scope) -> None:
    """Raises ConfigError for the first rule that a resolved job breaks: the job's own rules first, then the scope's."""
    for rule in (
        check_colocation,
        check_combinations,
        check_training,
        check_services,
        check_production,
        check_passwords,
        check_nodes,
        check_transport,
    ):
        rule(job)
    for scoped in (
        check_meeting,
        check_metrics_port,
        check_service_host,
        check_files,
        check_remote_code,
        check_folders,
    ):
        scoped(job, scope)
    if "trainer" in scope.services:
        require_gpus(job, scope)
        require_states_that_are_saved(job, scope)
    if "rollout" in scope.services:
        check_engine_machines(job, scope)
    if "trainer" in scope.services or "rollout" in scope.services:
        _check_architecture(job, scope)
        device_plan(job, scope)


def _check_architecture(job: Job, scope: Scope) -> None:
    found, args = known_architecture(job), megatron(job.megatron)
    if found is None:
        return
    if wrong := contradictions(found, args):
        raise ConfigError("; ".join(wrong))
    check_layout(found, args)
    virtual_stages(found, args)
    check_routing_replay(job, found)
    if job.lora.lora_rank is not None:
        check_adapters(found, args, job.lora.lora_target_modules)
        if job.publish.update_weight_transport == "adapter":
            check_served_adapters(found, job.lora.lora_target_modules)
    check_images(job, found)
    check_lengths(job, found)
    check_engine_ranks(job, found, scope)
    if "rollout" in scope.services and job.asks_engines:
        check_engine_model(job, found, scope)
    if job.model.model is not None and (other := differences(find(job.model.model), found)):
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is not {job.model.model}: its config.json says "
            f"{'; '.join(other)}. Name that model's folder, or leave --model out"
        )


def known_architecture(job: Job) -> Architecture | None:
    """The architecture of the model's folder, else of the preset; None when this machine has neither."""
    if (job.model.hf_checkpoint / "config.json").is_file():
        return read_architecture(job.model.hf_checkpoint)
    return None if job.model.model is None else architecture(find(job.model.model).config)
