"""Rules of training beside the tables of `combinations`: ranks, teachers, true on-policy mode, experts, GPUs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.algorithms import ALGORITHMS
from headrace.job.megatron import ONLY_IN, OPTIMIZER_ON_GPU, megatron
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.training import trains_on_old_log_probs
from headrace.models.architecture import Architecture


def uses_reference(job: Job) -> bool:
    """True when a reference policy is part of the loss or of the rewards."""
    if job.train.loss_type == "sft_loss":
        return False
    return (job.train.use_kl_loss and job.train.kl_loss_coef > 0) or job.train.kl_coef > 0


def uses_critic(job: Job) -> bool:
    """True when a critic is trained beside the policy."""
    return ALGORITHMS[job.train.advantage_estimator].has_critic and job.train.loss_type != "sft_loss"


def replays_routing(job: Job) -> bool:
    """True when experts are chosen only once: by the engines, or when old log-probs are computed."""
    return job.train.use_routing_replay or job.train.use_rollout_routing_replay


def rounds_kv_cache(job: Job) -> bool:
    """True when engines keep keys and values in fewer bits than the model computes with."""
    return job.sglang.get("kv_cache_dtype", "auto") not in ("auto", "bf16", "bfloat16")


_MASK_TOKENS = 4096
"""SGLang's own default."""
_EXACT_DRAFTS = ("DFLASH", "DSPARK")
"""Speculative decoding whose tokens are exact samples from a mask that SGLang returns."""


def mask_tokens(job: Job) -> int | None:
    """How many tokens of each sampling mask the job's engines return at most; None where they return no masks."""
    started_elsewhere = job.placement.rollout_external_engine_addrs
    functions = job.rollout.rollout_function_path or job.rollout.custom_generate_function_path
    if not job.train.keep_sampling_mask or started_elsewhere or functions:
        return None
    return int(job.sglang.get("sampling_mask_max_tokens", _MASK_TOKENS))


def narrows_sampling(job: Job) -> bool:
    """True where engines sample from some of the tokens alone."""
    return job.rollout.rollout_top_p < 1 or job.rollout.rollout_top_k is not None


def check_training(job: Job) -> None:
    """Raises ConfigError for the first rule that a job breaks."""
    _ranks(job)
    _megatron(job)
    _teacher(job)
    _true_on_policy(job)
    _sampling_mask(job)
    _tinker(job)
    if job.train.loss_mask_type is not None and job.rollout.n_samples_per_prompt != 1:
        raise ConfigError(
            f"loss_mask_type trains each conversation once, and n_samples_per_prompt is "
            f"{job.rollout.n_samples_per_prompt}: set it to 1"
        )


_NOT_WITH_TINKER = (
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


def _tinker(job: Job) -> None:
    if not job.serves_tinker:
        return
    if job.publish.update_weight_transport != "adapter":
        raise ConfigError(
            f"update_weight_transport {job.publish.update_weight_transport} with tinker_port: engines sample from the "
            "adapters of clients. Leave it out"
        )
    args = megatron(job.megatron)
    for name in _NOT_WITH_TINKER:
        if (size := getattr(args, name) or 1) > 1:
            raise ConfigError(
                f"{name} {size} with tinker_port: clients' models are divided over tensor ranks and data ranks. Leave "
                "it out"
            )


def _ranks(job: Job) -> None:
    args, world = megatron(job.megatron), job.placement.num_ranks
    product = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world % product:
        raise ConfigError(
            f"{world} ranks (actor_num_nodes {job.placement.actor_num_nodes} x actor_num_gpus_per_node "
            f"{job.placement.actor_num_gpus_per_node}) cannot be divided by tensor_model_parallel_size "
            f"{args.tensor_model_parallel_size} x pipeline_model_parallel_size {args.pipeline_model_parallel_size} x "
            f"context_parallel_size {args.context_parallel_size} = {product}: change one of them"
        )
    size = world // product
    if job.train.global_batch_size is not None and job.train.global_batch_size < size:
        raise ConfigError(
            f"global_batch_size {job.train.global_batch_size} is smaller than the {size} data-parallel ranks: "
            "some would have nothing to train on"
        )


def _megatron(job: Job) -> None:
    args = megatron(job.megatron)
    if args.context_parallel_size > 1 and job.train.packing == "padded":
        raise ConfigError(
            f"context_parallel_size {args.context_parallel_size} divides packed rows, and packing is padded: "
            "leave one of them out"
        )
    given = args.given(frozenset(ONLY_IN))
    try:
        installed = ".".join(version("megatron-core").split(".")[:2]) if given else ""
    except PackageNotFoundError:
        return  # the trainer's machine will check
    for name in given:
        if installed not in ONLY_IN[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} is a field of megatron-core {' and '.join(ONLY_IN[name])}, and "
                f"{installed} is installed: leave it out, or install the other version"
            )


def _teacher(job: Job) -> None:
    if job.distillation.opd_teacher_url is not None and job.rollout.rollout_temperature != 1.0:
        raise ConfigError(
            f"a served teacher returns log-probs at temperature 1, and rollout_temperature is "
            f"{job.rollout.rollout_temperature:g}: set it to 1, or hold the teacher with --opd-type megatron"
        )


def _true_on_policy(job: Job) -> None:
    if not job.train.true_on_policy_mode:
        return
    for name, value, wanted in (
        ("max_staleness", job.buffer.max_staleness, 0),
        ("num_steps_per_rollout", job.train.num_steps_per_rollout, 1),
        ("update_weights_interval", job.publish.update_weights_interval, 1),
        ("use_rollout_logprobs", job.train.use_rollout_logprobs, False),
        ("use_tis", job.train.use_tis, False),
        ("use_opsm", job.train.use_opsm, False),
        ("use_rs", job.train.use_rs, False),
    ):
        if value != wanted:
            raise ConfigError(
                f"true_on_policy_mode needs {name} {wanted}, and it is {value}: change it, or leave "
                "--true-on-policy-mode out"
            )
    if rounds_kv_cache(job):
        raise ConfigError(
            f"true_on_policy_mode with --sglang-kv-cache-dtype {job.sglang['kv_cache_dtype']}: engines round keys and "
            "values, and the trainer does not: leave one of them out"
        )
    if narrows_sampling(job) and mask_tokens(job) is None:
        raise ConfigError(
            f"true_on_policy_mode with rollout_top_p {job.rollout.rollout_top_p:g} and rollout_top_k "
            f"{job.rollout.rollout_top_k} needs the sets that engines sampled from: pass --keep-sampling-mask, and "
            "leave out external engines, and rollout and generate functions"
        )


def _sampling_mask(job: Job) -> None:
    if not job.train.keep_sampling_mask:
        return
    most, top_k, drafts = mask_tokens(job), job.rollout.rollout_top_k, job.sglang.get("speculative_algorithm")
    if not narrows_sampling(job):
        raise ConfigError(
            "keep_sampling_mask has no effect where engines sample from all tokens: add --rollout-top-p or "
            "--rollout-top-k, or leave --keep-sampling-mask out"
        )
    if most is None:
        if job.train.keep_old_actor:
            raise ConfigError(
                "keep_sampling_mask with keep_old_actor needs masks of headrace's own engines and sampler: others are "
                "computed with the current policy: leave one of them out"
            )
        return
    if top_k is not None and top_k > most:
        raise ConfigError(
            f"keep_sampling_mask: engines return {most} tokens of each mask at most, and rollout_top_k is {top_k}: "
            "lower it, or raise --sglang-sampling-mask-max-tokens"
        )
    if drafts is not None and drafts.upper() not in _EXACT_DRAFTS:
        raise ConfigError(
            f"keep_sampling_mask: SGLang returns no masks with speculative_algorithm {drafts}: leave one of them out, "
            f"or use {' or '.join(_EXACT_DRAFTS)}"
        )


def check_routing_replay(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for the first rule that is broken."""
    if not replays_routing(job):
        return
    flag = "use_rollout_routing_replay" if job.train.use_rollout_routing_replay else "use_routing_replay"
    if architecture.experts is None:
        raise ConfigError(f"{flag}: this {architecture.family} model has no experts to choose: leave it out")
    _router(job, flag)
    if not job.train.use_rollout_routing_replay:
        _old_log_probs(job)


def _router(job: Job, flag: str) -> None:
    args = megatron(job.megatron)
    if args.moe_router_fusion:
        raise ConfigError(
            f"{flag} with moe_router_fusion: the fused router does not take experts from outside: leave one out"
        )
    if args.moe_router_load_balancing_type in ("sinkhorn", ("sinkhorn",)):
        raise ConfigError(
            f"{flag} with moe_router_load_balancing_type sinkhorn: sinkhorn chooses other experts than the best "
            f"scores: leave one out"
        )


def _old_log_probs(job: Job) -> None:
    train = job.train
    if train.keep_old_actor:
        raise ConfigError(
            "use_routing_replay with keep_old_actor: old log-probs would be of several policies: pass "
            "--use-rollout-routing-replay, which replays the experts that each sample was generated with"
        )
    if not trains_on_old_log_probs(train) or train.num_steps_per_rollout == 1:
        raise ConfigError(
            "use_routing_replay has no effect: this job computes no old log-probs, because it takes one optimizer "
            "step per rollout or uses the engines' log-probs: leave it out, or pass --use-rollout-routing-replay"
        )


_OFFLOADED = {
    "cpu_offloading": (
        "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
        "cpu_offloading_retain_pinned_cpu_buffers"
    ),
    "fine_grained_activation_offloading": (
        "offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph activation_offload_fraction "
        "delta_offload_bytes_across_pp_ranks fine_grained_offloading_max_inflight_offloads"
    ),
}
"""Megatron's two ways to keep activations in the host's memory, and the flags that say how."""


def offloads_activations(job: Job, scope: Scope) -> None:
    """Refuses flags of activation offloading that have no effect, and what Megatron-core refuses at the start."""
    args = megatron(job.megatron)
    on = args.given(frozenset({*_OFFLOADED, "recompute_granularity", "recompute_activations"}))
    for name, parts in _OFFLOADED.items():
        given = args.given(frozenset(parts.split()))
        if given and not on.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{next(iter(given))} has no effect without {name}: pass {flag}, or leave it out")
        if name == "fine_grained_activation_offloading" and on.get(name) and not given.get("offload_modules"):
            raise ConfigError(f"{name} needs --offload-modules, such as core_attn")
    if not on.pop("cpu_offloading", False):
        return
    others = [name for name, value in on.items() if value]
    if args.pipeline_model_parallel_size > 1:
        others.append("pipeline_model_parallel_size")
    if others:
        raise ConfigError(f"cpu_offloading with {others[0]}: Megatron-core cannot do both: leave one of them out")
    if find_spec("transformer_engine") is None:
        scope.missing(
            "--cpu-offloading: Megatron-core does that with Transformer Engine, which is not installed here: install "
            "it, or use --fine-grained-activation-offloading with --offload-modules"
        )


def require_gpus(job: Job, scope: Scope) -> None:
    """Refuses flags that need a GPU when the trainer's machine has none."""
    flags = megatron(job.megatron).needs_gpu()
    if flags and not num_gpus():
        scope.missing(
            f"{', '.join(flags)}: Megatron-core does that only on a GPU, and this machine has none: leave it out"
        )


def require_states_that_are_saved(job: Job, scope: Scope) -> None:
    """Refuses an optimizer on a GPU whose states no checkpoint holds: those of Transformer Engine's Adam."""
    if job.debug.debug_rollout_only or not (num_gpus() or scope.elsewhere):
        return
    given = megatron(job.megatron).given(OPTIMIZER_ON_GPU)
    if given.get("use_precision_aware_optimizer") and not given.get("optimizer_cpu_offload"):
        scope.missing(
            "--use-precision-aware-optimizer: on a GPU the optimizer's states then have a form that headrace's "
            "checkpoints cannot hold, and every run ends with a checkpoint: pass --optimizer-cpu-offload as well, or "
            "leave it out"
        )
    if not given.get("optimizer_cpu_offload"):
        return
    args = megatron(job.megatron)
    if args.use_distributed_optimizer != args.bf16:
        scope.missing(
            "--optimizer-cpu-offload: Megatron-core does it with --bf16 and --use-distributed-optimizer, or with "
            f"neither: pass --{'bf16' if args.use_distributed_optimizer else 'use-distributed-optimizer'} as well"
        )
    if given.get("optimizer_offload_fraction", 1.0) != 1.0:
        scope.missing(
            f"--optimizer-offload-fraction {given['optimizer_offload_fraction']:g}: checkpoints hold the states of an "
            "optimizer that is on the host as a whole: leave it out, which means 1"
        )
