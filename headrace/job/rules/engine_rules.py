"""Rules of the engines: SGLang's arguments that a job may not set or that are out of range, lengths, tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.megatron.arguments import megatron
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.production import ContextLimit
from headrace.models.architecture import Architecture
from headrace.rpc.net import Address

OURS: Mapping[str, str] = {
    "model_path": "set hf_checkpoint instead",
    "tp_size": "set rollout_num_gpus_per_engine instead",
    "host": "engines listen on 127.0.0.1 only",
    "port": "a free port is chosen",
    "weight_version": "it is the policy version",
    "random_seed": "set rollout_seed instead",
    "base_gpu_id": "engines are laid out over rollout_num_gpus",
    "enable_return_routed_experts": "set use_rollout_routing_replay instead",
    "enable_memory_saver": "engines have it where they give their memory up: set colocate instead",
}
"""Arguments of SGLang that headrace sets, and what a job says instead."""

_TENSOR = "all GPUs of an engine are tensor-parallel. Choose their number with --rollout-num-gpus-per-engine"
_MORE = "the router spreads requests over engines. Start more of them with --rollout-num-gpus"
_ONE_MACHINE = "an engine is on one machine. Choose its number of GPUs there with --rollout-num-gpus-per-engine"
_WHOLE = "each engine computes prompts and responses. Start more of them with --rollout-num-gpus"
_PLACED_BY_US: Mapping[str, tuple[Any, str]] = {
    "pp_size": (1, _TENSOR),
    **dict.fromkeys(("dp_size", "attn_dp_size"), (1, _MORE)),
    **dict.fromkeys(("enable_dp_attention", "enable_dp_lm_head"), (False, _MORE)),
    "nnodes": (1, _ONE_MACHINE),
    "node_rank": (0, _ONE_MACHINE),
    "dist_init_addr": (None, _ONE_MACHINE),
    "gpu_id_step": (
        1,
        "engines have the GPUs of rollout_num_gpus one after the other. Hide others from the run with "
        "CUDA_VISIBLE_DEVICES",
    ),
    "use_ray": (False, "Ray places whole engines. Use --rollout-placement ray"),
    "disaggregation_mode": ("null", _WHOLE),
    "decoupled_spec_role": ("null", _WHOLE),
    "enable_pd_role_switch": (False, _WHOLE),
    "encoder_only": (False, _WHOLE),
    "language_only": (False, _WHOLE),
    "encoder_urls": ([], _WHOLE),
    **dict.fromkeys(("elastic_ep_backend", "elastic_ep_initial_size", "max_ep_size"), (None, _MORE)),
}
"""Arguments that would give an engine other processes or GPUs than it is placed on, with their defaults."""

_SHARES = ("mem_fraction_static", "schedule_conservativeness")
_AT_MOST_ONE = ("mem_fraction_static",)
_COUNTS = ("context_length", "max_running_requests", "max_total_tokens", "max_prefill_tokens", "page_size")
_DTYPES = {"float": "float32"}
"""SGLang's other names."""
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def check_engines(job: Job) -> None:
    """Raises ConfigError for an argument of SGLang that headrace sets, that is secret, or that is out of range."""
    for name, value in job.sglang.items():
        check_argument(name, value)
    _dtype(job)
    _groups(job)
    _external(job)
    _most(job)


def check_argument(name: str, value: object, where: str = "") -> None:
    """Raises ConfigError, which begins with `where`, for one argument of SGLang's."""
    if name in OURS:
        raise _refusal(name, f"cannot be given: {OURS[name]}", where)
    if name in _PLACED_BY_US and not _is_default(value, _PLACED_BY_US[name][0]):
        raise _refusal(name, f"{value} cannot be given: leave it out, because {_PLACED_BY_US[name][1]}", where)
    if name.startswith("disaggregation_") and name not in _PLACED_BY_US:
        raise _refusal(name, f"cannot be given: leave it out, because {_WHOLE}", where)
    if name in _SECRETS:
        raise ConfigError(
            f"{where}sglang {name}: engines listen on 127.0.0.1 and need no key, and a run's folder stores its job "
            "as plain text: leave it out",
            field=f"sglang.{name}",
        )
    if name in _SHARES and not _is_share(name, value):
        limit = "a number above 0 and below 1" if name in _AT_MOST_ONE else "a number above 0"
        raise _refusal(name, f"{value}: should be {limit}", where)
    if name in _COUNTS and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        raise _refusal(name, f"{value}: should be a number of 1 or more", where)


def check_lengths(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for a response or a context that is longer than what the engines can hold."""
    engines = ContextLimit.of_engines(job.sglang, architecture, job.placement.engine_groups)
    limit, whose = engines.tokens, engines.name
    for name, length in (
        ("rollout_max_response_len", job.rollout.rollout_max_response_len),
        ("eval_max_response_len", job.eval.eval_max_response_len),
        ("rollout_max_prompt_len", job.rollout.rollout_max_prompt_len),
    ):
        if length is not None and length >= limit and job.train.loss_mask_type is None:
            raise ConfigError(
                f"{name} {length} is not below {limit}, {whose}, which prompt and response share: pass "
                f"--{name.replace('_', '-')} {max(1, limit // 2)} or another smaller number",
                field=name,
            )
    context = job.rollout.rollout_max_context_len
    if context is not None and context > limit:
        raise ConfigError(
            f"rollout_max_context_len {context} is above {limit}, {whose}: lower it", field="rollout_max_context_len"
        )


def check_engine_ranks(job: Job, architecture: Architecture, scope: Scope) -> None:
    """Raises ConfigError when an engine's tensor ranks cannot divide the heads. On a CPU, SGLang adds heads."""
    if not num_gpus() and scope.elsewhere is None:
        return
    of_groups = {group.size: f"engine group {group.name}: num_gpus_per_engine" for group in job.placement.engine_groups}
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    for ranks, name in (
        of_groups or {job.placement.rollout_num_gpus_per_engine: "rollout_num_gpus_per_engine"}
    ).items():
        if not heads % ranks and (not groups % ranks or not ranks % groups):
            continue
        raise ConfigError(
            f"{name} {ranks} does not divide the {heads} heads in {groups} groups of this model: "
            "choose a divisor of both",
            field="rollout_num_gpus_per_engine",
        )


def _dtype(job: Job) -> None:
    """Engines whose weights have another dtype than the published ones would refuse the first publication."""
    given, published = job.sglang.get("dtype"), megatron(job.megatron).dtype
    if given is None or _DTYPES.get(given, given) == published or job.debug.debug_rollout_only:
        return
    other = "with" if published == "float32" else "without"
    raise _refusal(
        "dtype",
        f"{given}: engines serve the weights that the trainer publishes, which are {published}: leave --sglang-dtype "
        f"out, or train {other} --bf16",
        "",
    )


def _external(job: Job) -> None:
    """Engines that are started elsewhere, and what a job cannot ask of them."""
    addresses, placement = job.placement.rollout_external_engine_addrs, job.placement
    if not addresses:
        return
    if len({str(Address.parse(address)) for address in addresses}) < len(addresses):
        raise ConfigError(
            f"rollout_external_engine_addrs {list(addresses)} has an address twice: name each engine once",
            field="rollout_external_engine_addrs",
        )
    of_each, rest = divmod(len(addresses), job.services.num_rollout_services)
    if rest:
        raise ConfigError(
            f"rollout_external_engine_addrs names {len(addresses)} engines, which {job.services.num_rollout_services} "
            "rollout services cannot divide evenly: name as many for each",
            field="rollout_external_engine_addrs",
        )
    size = of_each * placement.rollout_num_gpus_per_engine
    for name, is_set, why in (
        (
            "rollout_num_gpus",
            placement.rollout_num_gpus not in (1, size),
            f"{of_each} engines of {placement.rollout_num_gpus_per_engine} have {size}",
        ),
        ("debug_rollout_only", job.debug.debug_rollout_only, "nothing would give them hf_checkpoint's weights"),
        (
            "use_rollout_routing_replay",
            job.train.use_rollout_routing_replay,
            "only engines that are started here are known to return experts",
        ),
    ):
        if is_set:
            raise ConfigError(f"{name} with rollout_external_engine_addrs: {why}; leave one of them out", field=name)
    far = [address for address in addresses if not Address.parse(address).is_loopback]
    if far and job.publish.update_weight_transport == "ipc":
        raise ConfigError(
            f"update_weight_transport ipc is memory of this machine, and {far[0]} may be another: choose collective or "
            "disk",
            field="update_weight_transport",
        )


def _most(job: Job) -> None:
    most, count = job.placement.rollout_max_engines, job.placement.num_engines
    if most is None:
        return
    if job.placement.rollout_external_engine_addrs:
        raise ConfigError(
            "rollout_max_engines with rollout_external_engine_addrs: engines are started and ended elsewhere; leave "
            "it out",
            field="rollout_max_engines",
        )
    if most < count:
        raise ConfigError(
            f"rollout_max_engines {most} is below the {count} engines with which the job begins: raise it, or lower "
            "--rollout-num-gpus",
            field="rollout_max_engines",
        )


def _groups(job: Job) -> None:
    gpus, each = job.placement.rollout_num_gpus, job.placement.rollout_num_gpus_per_engine
    if gpus % each and not job.placement.rollout_external_engine_addrs and not job.placement.engine_groups:
        raise ConfigError(
            f"rollout_num_gpus {gpus} cannot be divided by rollout_num_gpus_per_engine {each}", field="rollout_num_gpus"
        )


def _is_default(value: object, default: object) -> bool:
    """True for None, too, as which the word `null` is read."""
    return value is None or (type(value) is type(default) and value == default)


def _is_share(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0 and (value < 1 or name not in _AT_MOST_ONE)


def _refusal(name: str, message: str, where: str = "") -> ConfigError:
    return ConfigError(f"{where}--sglang-{name.replace('_', '-')} {message}", field=f"sglang.{name}")
