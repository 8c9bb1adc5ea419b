"""Rules over several options. Each message names the contradicting values and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.megatron.arguments import megatron
from headrace.job.model import check_layout, contradictions, virtual_stages
from headrace.job.rules.algorithm_rules import check_algorithm
from headrace.job.rules.buffer_rules import check_buffer
from headrace.job.rules.debug_rules import check_debug
from headrace.job.rules.dependencies import check_dependencies
from headrace.job.rules.engine_rules import check_engine_ranks, check_engines, check_lengths
from headrace.job.rules.eval_rules import check_evaluations
from headrace.job.rules.group_rules import check_engine_groups, check_engine_placement, check_group_sizes
from headrace.job.rules.image_rules import check_images
from headrace.job.rules.lora_rules import check_lora, check_lora_targets
from headrace.job.rules.machines.colocation import check_colocation
from headrace.job.rules.machines.gpus import check_gpus
from headrace.job.rules.machines.nodes import check_meeting, check_nodes
from headrace.job.rules.megatron_rules import check_megatron, require_gpus, require_states_that_are_saved
from headrace.job.rules.paths.files import check_files
from headrace.job.rules.paths.folders import check_folders
from headrace.job.rules.remote_code import check_remote_code
from headrace.job.rules.routing_rules import check_routing_replay
from headrace.job.rules.scope import Scope
from headrace.job.rules.service_rules import (
    addresses_of,
    check_metrics_port,
    check_service_host,
    check_services,
)
from headrace.job.schema.job import Job
from headrace.job.schema.run import passwords
from headrace.job.schema.training import trains_on_old_log_probs
from headrace.models.architecture import Architecture
from headrace.models.folders import BlockFp8, is_torn
from headrace.models.registry import architecture, differences, find, read_architecture


def check(job: Job, scope: Scope) -> None:
    """Raises ConfigError for the first rule that a resolved job breaks: the job's own rules first, then the scope's."""
    for rule in _RULES:
        rule(job)
    check_meeting(job, scope)
    check_metrics_port(job, scope)
    check_service_host(job, scope)
    check_files(job, scope)
    check_remote_code(job, scope)
    check_folders(job, scope)
    if "trainer" in scope.services:
        require_gpus(job, scope)
        require_states_that_are_saved(job, scope)
        _export_folder_is_new(job)
    if "rollout" in scope.services:
        check_group_sizes(job, scope)
        check_engine_placement(job, scope)
    if "trainer" in scope.services or "rollout" in scope.services:
        _architecture(job, scope)
        _engines_compute_in_fp8(job, scope)
        check_gpus(job, scope)


def _agents(job: Job) -> None:
    """Raises ConfigError for an option that has no meaning with agent_function_path, or contradicts it."""
    rollout = job.rollout
    if rollout.agent_function_path is None:
        return
    for name, is_set, why in (
        ("custom_generate_function_path", rollout.custom_generate_function_path, "both make the samples"),
        ("rollout_function_path", rollout.rollout_function_path, "both make the samples"),
        ("partial_rollout", rollout.partial_rollout, "an agent's run cannot be continued from its tokens"),
        (
            "use_rollout_routing_replay",
            job.train.use_rollout_routing_replay,
            "the experts of a session's requests are not recorded",
        ),
    ):
        if is_set:
            raise ConfigError(f"{name} with agent_function_path: {why}; leave one of them out", field=name)


def _micro_batches(job: Job) -> None:
    train = job.train
    if not train.use_dynamic_batch_size:
        return
    if train.max_tokens_per_gpu is None:
        raise ConfigError(
            "use_dynamic_batch_size fills micro-batches up to max_tokens_per_gpu: pass --max-tokens-per-gpu",
            field="max_tokens_per_gpu",
        )
    if train.micro_batch_size != 1:
        raise ConfigError(
            f"micro_batch_size {train.micro_batch_size} has no effect with use_dynamic_batch_size: leave it out, "
            f"max_tokens_per_gpu {train.max_tokens_per_gpu} decides",
            field="micro_batch_size",
        )


def _ranks(job: Job) -> None:
    args, world = megatron(job.megatron), job.placement.num_ranks
    product = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world % product:
        raise ConfigError(
            f"{world} ranks (actor_num_nodes {job.placement.actor_num_nodes} x actor_num_gpus_per_node "
            f"{job.placement.actor_num_gpus_per_node}) cannot be divided by tensor_model_parallel_size "
            f"{args.tensor_model_parallel_size} x pipeline_model_parallel_size {args.pipeline_model_parallel_size} x "
            f"context_parallel_size {args.context_parallel_size} = {product}: change one of them",
            field="actor_num_gpus_per_node",
        )
    size = world // product
    if job.train.global_batch_size is not None and job.train.global_batch_size < size:
        raise ConfigError(
            f"global_batch_size {job.train.global_batch_size} is smaller than the {size} data-parallel ranks: "
            "some would have nothing to train on",
            field="global_batch_size",
        )


def _old_actor_is_used(job: Job) -> None:
    train = job.train
    if not train.keep_old_actor:
        return
    if not trains_on_old_log_probs(train):
        raise ConfigError(
            "keep_old_actor has no effect: this loss does not use the old policy's log-probs: leave it out",
            field="keep_old_actor",
        )
    if job.buffer.max_staleness == 0:
        raise ConfigError(
            "keep_old_actor has no effect with max_staleness 0: every sample comes from the current policy: leave "
            "it out",
            field="keep_old_actor",
        )


def _frozen_parameters(job: Job) -> None:
    only, freeze = job.train.only_train_params_name_list, job.train.freeze_params_name_list
    if only and freeze:
        raise ConfigError(
            "only_train_params_name_list and freeze_params_name_list set the same thing: give only one",
            field="freeze_params_name_list",
        )
    for pattern in (*only, *freeze):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is not a regular expression: {error}", field="freeze_params_name_list"
            ) from error


def _context_length(job: Job) -> None:
    limit, response = job.rollout.rollout_max_context_len, job.rollout.rollout_max_response_len
    if limit is not None and limit <= response:
        raise ConfigError(
            f"rollout_max_context_len {limit} leaves no room for a prompt beside rollout_max_response_len {response}",
            field="rollout_max_context_len",
        )


def _no_passwords(job: Job) -> None:
    if found := passwords(job.model_dump(mode="json")):
        raise ConfigError(
            f"{found[0]} holds a URL with a password, and a run's folder stores its job as plain text: remove the "
            f"password "
            "and let the service read it from its environment or from another file",
            field=found[0],
        )


def _weights_are_shared(job: Job) -> None:
    publish = job.publish
    transport = publish.update_weight_transport
    if transport == "collective":
        return
    if publish.update_weight_rollback == "host":
        raise ConfigError(
            f"update_weight_rollback host keeps a copy in memory of what lies in the folder of update_weight_transport "
            f"{transport}, from which engines load it again: leave --update-weight-rollback out",
            field="update_weight_rollback",
        )
    address = job.services.rollout_address
    is_here = all(each.is_loopback for each in addresses_of(address))
    on_ray = job.placement.rollout_placement == "ray"
    if is_here and not on_ray and job.placement.actor_num_nodes == 1:
        return
    where = f"rollout at {address}" if not is_here else f"{job.placement.actor_num_nodes} machines"
    where = "engines that Ray places" if on_ray else where
    if transport == "ipc":
        raise ConfigError(
            f"update_weight_transport ipc with {where}: trainer and engines share no memory. Use "
            "--update-weight-transport collective or disk",
            field="update_weight_transport",
        )
    if publish.update_weight_disk_path is None:
        raise ConfigError(
            f"update_weight_transport disk with {where}: the run's folder may be this machine's alone. Name a folder "
            "that all machines see at the same path with --update-weight-disk-path",
            field="update_weight_disk_path",
        )


def _export_folder_is_new(job: Job) -> None:
    folder = job.checkpoint.save_hf
    if folder is None or not folder.exists() or (folder.is_dir() and is_torn(folder)):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ConfigError(
            f"save_hf {folder} exists and is not empty: name a new folder, or remove it",
            field="save_hf",
        )


def _engines_compute_in_fp8(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a quantization that engines cannot be given, too."""
    if BlockFp8.of(job.model.hf_checkpoint) is None or "rollout" not in scope.services:
        return
    if not num_gpus():
        scope.missing(
            ConfigError(
                f"hf_checkpoint {job.model.hf_checkpoint} is in block FP8, in which SGLang computes only on a GPU, and "
                "this machine has none: name a folder in bfloat16 or float32",
                field="hf_checkpoint",
            )
        )
    if megatron(job.megatron).dtype != "bfloat16":
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is in block FP8, whose other weights SGLang takes in bfloat16, "
            "and the trainer publishes float32: pass --bf16, or name a folder in float32",
            field="bf16",
        )


def _architecture(job: Job, scope: Scope) -> None:
    found = known_architecture(job)
    if found is None:
        return
    wrong = contradictions(found, megatron(job.megatron))
    if wrong:
        raise ConfigError("; ".join(wrong))
    check_layout(found, megatron(job.megatron))
    virtual_stages(found, megatron(job.megatron))
    check_routing_replay(job, found)
    check_lora_targets(job, found)
    check_images(job, found)
    check_lengths(job, found)
    check_engine_ranks(job, found, scope)
    if job.model.model is not None and (other := differences(find(job.model.model), found)):
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is not {job.model.model}: its config.json says "
            f"{'; '.join(other)}. Name that model's folder, or leave --model out",
            field="model",
        )


def known_architecture(job: Job) -> Architecture | None:
    """The architecture of the model's folder, else of the preset; None when this machine has neither."""
    if (job.model.hf_checkpoint / "config.json").is_file():
        return read_architecture(job.model.hf_checkpoint)
    return None if job.model.model is None else architecture(find(job.model.model).config)


_RULES: Sequence[Callable[[Job], None]] = (
    check_colocation,
    check_dependencies,
    check_buffer,
    _micro_batches,
    _ranks,
    check_megatron,
    _frozen_parameters,
    check_lora,
    _old_actor_is_used,
    check_services,
    check_engines,
    check_engine_groups,
    _context_length,
    _no_passwords,
    check_nodes,
    _weights_are_shared,
    check_algorithm,
    _agents,
    check_evaluations,
    check_debug,
)
