"""Rules over several leaves. Each says which values contradict each other and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.config.algorithm_rules import ALGORITHM_NEEDS, check_algorithm, uses_reference
from headrace.config.files import check_files
from headrace.config.job import Job
from headrace.config.leaf import leaves
from headrace.config.megatron import MegatronArgs
from headrace.config.megatron_rules import check_megatron
from headrace.config.secrets import passwords
from headrace.errors import ConfigError
from headrace.models.megatron import contradictions
from headrace.models.presets import differences, find
from headrace.models.registry import read_architecture
from headrace.rpc.net import Address

_SECRET_ARGUMENTS = ("api_key", "admin_api_key", "ssl_keyfile_password")

_NEEDS: Mapping[str, tuple[str, Callable[[Job], bool]]] = {
    **ALGORITHM_NEEDS,
    "max_tokens_per_gpu": ("use_dynamic_batch_size", lambda job: job.train.use_dynamic_batch_size),
    "balance_by": ("balance_data", lambda job: job.train.balance_data),
    "buffer_postgres": ("buffer_store", lambda job: job.buffer.buffer_store == "postgres"),
    "buffer_shard": ("buffer_addresses", lambda job: bool(job.buffer.buffer_addresses)),
    "ref_update_interval": ("use_kl_loss", uses_reference),
    "keep_best_metric": ("keep_best", lambda job: job.checkpoint.keep_best > 0),
    "group_rm": ("custom_rm_path", lambda job: job.reward.custom_rm_path is not None),
    "max_turns": ("custom_generate_function_path", lambda job: job.rollout.custom_generate_function_path is not None),
    "eval_interval": ("eval_prompt_data", lambda job: bool(job.eval.eval_prompt_data)),
    "n_samples_per_eval_prompt": ("eval_prompt_data", lambda job: bool(job.eval.eval_prompt_data)),
    "eval_temperature": ("eval_prompt_data", lambda job: bool(job.eval.eval_prompt_data)),
    "eval_max_response_len": ("eval_prompt_data", lambda job: bool(job.eval.eval_prompt_data)),
    "rollout_shuffle": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "num_epoch": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "prompt_data_weights": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "streaming_data": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "mask_offpolicy_in_partial_rollout": ("partial_rollout", lambda job: job.rollout.partial_rollout),
    "num_data_workers": ("streaming_data", lambda job: job.data.streaming_data),
    "buffer_hook_timeout_seconds": (
        "buffer_filter_path",
        lambda job: bool(job.buffer.buffer_filter_path or job.data.data_source_path),
    ),
    "samples_per_insert": ("min_size_to_sample", lambda job: job.buffer.min_size_to_sample is not None),
    "samples_per_insert_error_buffer": ("samples_per_insert", lambda job: job.buffer.samples_per_insert is not None),
    "wandb_project": ("use_wandb", lambda job: job.tracking.use_wandb),
    "wandb_mode": ("use_wandb", lambda job: job.tracking.use_wandb),
    "skip_bad_lines": ("prompt_data", lambda job: bool(job.data.prompt_data)),
    "max_trainer_restarts": ("use_fault_tolerance", lambda job: job.placement.use_fault_tolerance),
}
"""A leaf that has no effect without another one."""


def check(job: Job) -> None:
    """Raises ConfigError for the first rule that a resolved job breaks."""
    for rule in _RULES:
        rule(job)


def _no_ignored_leaves(job: Job) -> None:
    known = leaves()
    for name, (needed, has_it) in _NEEDS.items():
        section = getattr(job, known[name].section)
        if getattr(section, name) != known[name].default and not has_it(job):
            raise ConfigError(
                f"{name} has no effect without {needed}: add {known[needed].flag} or leave {known[name].flag} out",
                field=name,
            )


def _postgres_has_a_database(job: Job) -> None:
    if job.buffer.buffer_store == "postgres" and job.buffer.buffer_postgres is None:
        raise ConfigError(
            "buffer_store postgres needs a database: pass --buffer-postgres postgresql://USER@HOST/NAME",
            field="buffer_postgres",
        )


def _shards_add_up(job: Job) -> None:
    buffer, num_shards = job.buffer, len(job.buffer.buffer_addresses)
    if not num_shards:
        return
    if len(set(buffer.buffer_addresses)) < num_shards:
        raise ConfigError(f"buffer_addresses {list(buffer.buffer_addresses)} names one twice", field="buffer_addresses")
    if job.services.buffer_address not in (None, ",".join(buffer.buffer_addresses)):
        raise ConfigError(
            f"buffer_address {job.services.buffer_address} is given, and buffer_addresses too: leave one of them out",
            field="buffer_addresses",
        )
    if buffer.buffer_shard is not None and buffer.buffer_shard >= num_shards:
        raise ConfigError(
            f"buffer_shard {buffer.buffer_shard} is none of the {num_shards} buffer_addresses: they are counted from 0",
            field="buffer_shard",
        )
    if (job.rollout.rollout_batch_size or num_shards) < num_shards:
        raise ConfigError(
            f"rollout_batch_size {job.rollout.rollout_batch_size} is less than the {num_shards} shards: "
            "every shard needs a group in every step",
            field="buffer_addresses",
        )


def _synchronous_when_colocated(job: Job) -> None:
    if not job.placement.colocate:
        return
    if job.buffer.max_staleness or job.publish.update_weights_interval > 1:
        raise ConfigError(
            f"colocate cannot be combined with asynchronous training (max_staleness {job.buffer.max_staleness}, "
            f"update_weights_interval {job.publish.update_weights_interval}): trainer and engines take turns on the "
            "same GPUs. Leave --colocate out, or set both back to 0 and 1",
            field="colocate",
        )
    raise ConfigError("colocate is not built yet: leave it out and give engines GPUs of their own", field="colocate")


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


def _interval_within_staleness(job: Job) -> None:
    behind = job.publish.update_weights_interval - 1
    if behind > job.buffer.max_staleness:
        raise ConfigError(
            f"update_weights_interval {behind + 1} makes tokens up to {behind} steps old, and max_staleness is "
            f"{job.buffer.max_staleness}: pass --max-staleness {behind} or a shorter interval",
            field="update_weights_interval",
        )


def _mixed_prompts(job: Job) -> None:
    files, weights = job.data.prompt_data, job.data.prompt_data_weights
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"prompt_data_weights has {len(weights)} numbers for {len(files)} files of prompt_data: give one for each",
            field="prompt_data_weights",
        )


def _hooks_of_the_buffer(job: Job) -> None:
    if job.data.data_source_path and job.data.prompt_data:
        raise ConfigError(
            f"data_source_path {job.data.data_source_path} gives the prompts, and so does prompt_data "
            f"{', '.join(job.data.prompt_data)}: leave one out",
            field="data_source_path",
        )
    if job.buffer.buffer_filter_path and job.buffer.selection != "fifo":
        raise ConfigError(
            f"buffer_filter_path chooses the batches, selection {job.buffer.selection} has no effect: leave one out",
            field="selection",
        )


def _limiter(job: Job) -> None:
    buffer, groups = job.buffer, job.rollout.rollout_batch_size
    if buffer.samples_per_insert is None or groups is None:
        return
    least = (groups + buffer.samples_per_insert) / 2
    if buffer.samples_per_insert_error_buffer is None or buffer.samples_per_insert_error_buffer < least:
        raise ConfigError(
            f"samples_per_insert needs a samples_per_insert_error_buffer of {least:g} or more, half of "
            f"rollout_batch_size {groups} and one insert, not {buffer.samples_per_insert_error_buffer}: with less, "
            "producers and trainer wait for each other",
            field="samples_per_insert_error_buffer",
        )


def _partial_rollout(job: Job) -> None:
    if not job.rollout.partial_rollout or job.rollout.mask_offpolicy_in_partial_rollout or job.buffer.max_staleness:
        return
    raise ConfigError(
        "partial_rollout with max_staleness 0 keeps tokens of older policies that could never be trained: pass "
        "--mask-offpolicy-in-partial-rollout, or --max-staleness 1 or more",
        field="partial_rollout",
    )


def _over_sampling(job: Job) -> None:
    asked, needed = job.rollout.over_sampling_batch_size, job.rollout.rollout_batch_size
    if asked is not None and needed is not None and asked < needed:
        raise ConfigError(
            f"over_sampling_batch_size {asked} is below rollout_batch_size {needed}: a step could not fill; "
            f"pass {needed} or more, or leave it out",
            field="over_sampling_batch_size",
        )


def _ranks(job: Job) -> None:
    args, world = megatron(job), ranks(job)
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
    if train.loss_type == "sft_loss" or (train.use_rollout_logprobs and not train.use_tis):
        raise ConfigError(
            "keep_old_actor has no effect: nothing in this loss asks for the old policy's log-probs: leave it out",
            field="keep_old_actor",
        )
    if job.buffer.max_staleness == 0:
        raise ConfigError(
            "keep_old_actor has no effect with max_staleness 0: every sample is of the current policy: leave it out",
            field="keep_old_actor",
        )


def _frozen_parameters(job: Job) -> None:
    only, freeze = job.train.only_train_params_name_list, job.train.freeze_params_name_list
    if only and freeze:
        raise ConfigError(
            "only_train_params_name_list and freeze_params_name_list say the same thing in two ways: give one",
            field="freeze_params_name_list",
        )
    for pattern in (*only, *freeze):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is no regular expression: {error}", field="freeze_params_name_list"
            ) from error


def _engines(job: Job) -> None:
    gpus, each = job.placement.rollout_num_gpus, job.placement.rollout_num_gpus_per_engine
    if gpus % each:
        raise ConfigError(
            f"rollout_num_gpus {gpus} cannot be divided by rollout_num_gpus_per_engine {each}", field="rollout_num_gpus"
        )


def _context_length(job: Job) -> None:
    limit, response = job.rollout.rollout_max_context_len, job.rollout.rollout_max_response_len
    if limit is not None and limit <= response:
        raise ConfigError(
            f"rollout_max_context_len {limit} leaves no room for a prompt beside rollout_max_response_len {response}",
            field="rollout_max_context_len",
        )


def _no_secrets(job: Job) -> None:
    for name in _SECRET_ARGUMENTS:
        if name in job.sglang:
            raise ConfigError(
                f"sglang {name}: engines listen on 127.0.0.1 and take no key, and a run's folder keeps its job in "
                "clear: leave it out",
                field=f"sglang.{name}",
            )


def _no_passwords(job: Job) -> None:
    if found := passwords(job.model_dump(mode="json")):
        raise ConfigError(
            f"{found[0]} holds a URL with a password, and a run's folder keeps its job in clear: take the password out "
            "and let the service read it from its environment or a file of its own",
            field=found[0],
        )


def _several_machines(job: Job) -> None:
    if job.placement.actor_num_nodes == 1:
        return
    services = {"buffer": job.services.buffer_address, "rollout": job.services.rollout_address}
    for name, address in services.items():
        if address is None or Address.parse(address).is_loopback:
            where = "is started on this machine's loopback" if address is None else f"is at {address}"
            raise ConfigError(
                f"actor_num_nodes {job.placement.actor_num_nodes}: ranks on other machines cannot reach {name}, which "
                f"{where}: start it at an address of its machine and pass --{name}-address",
                field=f"{name}_address",
            )


def _export_folder_is_new(job: Job) -> None:
    folder = job.checkpoint.save_hf
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"save_hf {folder} is there already and not empty: name a new folder, or remove it",
            field="save_hf",
        )


def _architecture(job: Job) -> None:
    architecture = read_architecture(job.model.hf_checkpoint)
    wrong = contradictions(architecture, megatron(job))
    if wrong:
        raise ConfigError("; ".join(wrong))
    if job.model.model is not None and (other := differences(find(job.model.model), architecture)):
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is not {job.model.model}: its config.json says "
            f"{'; '.join(other)}. Name that model's folder, or leave --model out",
            field="model",
        )


_RULES: Sequence[Callable[[Job], None]] = (
    _synchronous_when_colocated,
    _postgres_has_a_database,
    _shards_add_up,
    _no_ignored_leaves,
    _micro_batches,
    _interval_within_staleness,
    _mixed_prompts,
    _hooks_of_the_buffer,
    _limiter,
    _over_sampling,
    _partial_rollout,
    _ranks,
    check_megatron,
    _frozen_parameters,
    _old_actor_is_used,
    _engines,
    _context_length,
    _no_secrets,
    _no_passwords,
    _several_machines,
    check_files,
    check_algorithm,
    _export_folder_is_new,
    _architecture,
)


def megatron(job: Job) -> MegatronArgs:
    """Megatron's arguments of a job, typed."""
    return MegatronArgs.model_validate(job.megatron)


def ranks(job: Job) -> int:
    """Processes of the trainer."""
    return job.placement.actor_num_nodes * job.placement.actor_num_gpus_per_node
