"""Rules of production: the buffer's batches and shards, engines and their groups, lengths, images and evaluations."""

from __future__ import annotations

import importlib.util
import json
import os

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.engine_shape import engine_shapes
from headrace.job.megatron import megatron
from headrace.job.names import PLACED_BY_US, SGLANG, SLIME, reason_of_each
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.placement import EngineGroup
from headrace.job.schema.production import ContextLimit
from headrace.models.architecture import Architecture
from headrace.models.folders import QuantizedForm
from headrace.rpc.net import Address

_LARGEST_SHARE = {"mem_fraction_static": 1.0, "schedule_conservativeness": float("inf")}
_OF_ALL_ENGINES = reason_of_each(SGLANG["of_all_engines"])


def check_production(job: Job) -> None:
    """Raises ConfigError for the first rule that a job breaks."""
    _batches(job)
    for name, value in job.sglang.items():
        _check_argument(name, value)
    _dtype(job)
    _engine_counts(job)
    _external_engines(job)
    _engine_groups(job)
    _engine_shapes(job)
    _draft_model(job)
    metric = job.checkpoint.keep_best_metric
    if job.checkpoint.keep_best and metric.startswith("eval") and not job.eval.eval_exact_version:
        raise ConfigError(
            f"keep_best_metric {metric} cannot tell which checkpoint is best: training goes on beside evaluations, so "
            "that later versions answer too. Let it wait for them with --eval-exact-version, or choose by reward/mean"
        )


def _batches(job: Job) -> None:
    buffer, rollout, groups = job.buffer, job.rollout, job.rollout.groups_per_step
    if groups < job.num_shards:
        raise ConfigError(
            f"rollout_batch_size {groups} is less than the {job.num_shards} shards: every shard needs a group in every "
            "step"
        )
    behind = job.publish.update_weights_interval - 1
    if behind > buffer.max_staleness:
        raise ConfigError(
            f"update_weights_interval {behind + 1} makes tokens up to {behind} steps old, and max_staleness is "
            f"{buffer.max_staleness}: pass --max-staleness {behind} or a shorter interval"
        )
    files, weights = job.data.prompt_data, job.data.prompt_data_weights
    if weights and len(weights) != len(files):
        raise ConfigError(
            f"prompt_data_weights has {len(weights)} numbers for {len(files)} files of prompt_data: give one for each"
        )
    if rollout.over_sampling_batch_size is not None and rollout.over_sampling_batch_size < groups:
        raise ConfigError(
            f"over_sampling_batch_size {rollout.over_sampling_batch_size} is below rollout_batch_size {groups}: a step "
            f"would never fill; pass {groups} or more, or leave it out"
        )
    if rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout and not buffer.max_staleness:
        raise ConfigError(
            "partial_rollout with max_staleness 0 keeps tokens of older policies that could never be trained: pass "
            "--mask-offpolicy-in-partial-rollout, or --max-staleness 1 or more"
        )


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
                f"--{name.replace('_', '-')} {max(1, limit // 2)} or another smaller number"
            )
    context = job.rollout.rollout_max_context_len
    if context is not None and context > limit:
        raise ConfigError(f"rollout_max_context_len {context} is above {limit}, {whose}: lower it")


def check_images(job: Job, architecture: Architecture) -> None:
    """Raises ConfigError for a job whose prompts have images that nothing would look at."""
    if not job.data.multimodal_keys:
        return
    if architecture.vision is None:
        raise ConfigError(
            f"multimodal_keys {job.data.multimodal_keys}: this {architecture.family} model reads text alone: name a "
            "model with a vision tower (qwen2_5_vl, qwen3_vl), or leave --multimodal-keys out"
        )
    if job.distillation.use_opd and job.distillation.opd_type != "megatron":
        raise ConfigError(
            "multimodal_keys with opd_type: a teacher at a URL is asked about tokens alone; leave one of them out"
        )


def _check_argument(name: str, value: object, where: str = "") -> None:
    """Raises ConfigError, which begins with `where`, for one argument of SGLang's."""
    if (why := _refused_argument(name, value)) is not None:
        raise ConfigError(f"{where}--sglang-{name.replace('_', '-')} {why}")


def _refused_argument(name: str, value: object) -> str | None:
    if name in SGLANG["ours"]:
        return f"cannot be given: {SGLANG['ours'][name]}"
    if name in PLACED_BY_US:
        default, why = PLACED_BY_US[name]
        # The word `null` is read as None.
        if value is not None and not (type(value) is type(default) and value == default):
            return f"{value} cannot be given: leave it out, because {why}"
    if name in SGLANG["secrets"]:
        return "cannot be given: engines listen on 127.0.0.1 and need no key, and a run's folder stores its job as " + (
            "plain text: leave it out"
        )
    if name == "kv_cache_dtype" and value not in SGLANG["kv_cache_dtypes"]:
        return f"{value}: choose from {', '.join(SGLANG['kv_cache_dtypes'])}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _LARGEST_SHARE and not (is_number and 0 < value < _LARGEST_SHARE[name]):  # type: ignore[operator]
        below = " and below 1" if _LARGEST_SHARE[name] == 1 else ""
        return f"{value}: should be a number above 0{below}"
    if name in SGLANG["counts"] and not (is_number and isinstance(value, int) and value > 0):
        return f"{value}: should be a number of 1 or more"
    return None


def _dtype(job: Job) -> None:
    """Engines whose weights have another dtype than the published ones would refuse the first publication."""
    given, published = job.sglang.get("dtype"), megatron(job.megatron).dtype
    is_same = given is None or {"float": "float32"}.get(given, given) == published
    if is_same or job.debug.debug_rollout_only:
        return
    other = "with" if published == "float32" else "without"
    raise ConfigError(
        f"--sglang-dtype {given}: engines serve the weights that the trainer publishes, which are {published}: leave "
        f"--sglang-dtype out, or train {other} --bf16"
    )


def _engine_counts(job: Job) -> None:
    placement = job.placement
    gpus, each = placement.rollout_num_gpus, placement.rollout_num_gpus_per_engine
    if gpus % each and not placement.rollout_external_engine_addrs and not placement.engine_groups:
        raise ConfigError(f"rollout_num_gpus {gpus} cannot be divided by rollout_num_gpus_per_engine {each}")
    if job.services.rollout_runs > 1 and job.publish.update_weight_transport != "adapter":
        raise ConfigError(
            f"rollout_runs {job.services.rollout_runs} with update_weight_transport "
            f"{job.publish.update_weight_transport}: runs share one base, each with adapters of its own: pass "
            "--update-weight-transport adapter",
            field="services.rollout_runs",
        )
    most = placement.rollout_max_engines
    if most is not None and most < placement.num_engines:
        raise ConfigError(
            f"rollout_max_engines {most} is below the {placement.num_engines} engines with which the job begins: raise "
            "it, or lower --rollout-num-gpus"
        )


def _external_engines(job: Job) -> None:
    """Engines that are started elsewhere, and what a job cannot ask of them."""
    addresses, placement = job.placement.rollout_external_engine_addrs, job.placement
    if not addresses:
        return
    if len({str(Address.parse(address)) for address in addresses}) < len(addresses):
        raise ConfigError(
            f"rollout_external_engine_addrs {list(addresses)} has an address twice: name each engine once"
        )
    of_each, rest = divmod(len(addresses), job.services.num_rollout_services)
    if rest:
        raise ConfigError(
            f"rollout_external_engine_addrs names {len(addresses)} engines, which {job.services.num_rollout_services} "
            "rollout services cannot divide evenly: name as many for each"
        )
    size = of_each * placement.rollout_num_gpus_per_engine
    if placement.rollout_num_gpus not in (1, size):
        raise ConfigError(
            f"rollout_num_gpus with rollout_external_engine_addrs: {of_each} engines of "
            f"{placement.rollout_num_gpus_per_engine} have {size}; leave one of them out"
        )
    far = [address for address in addresses if not Address.parse(address).is_loopback]
    if far and job.publish.update_weight_transport == "ipc":
        raise ConfigError(
            f"update_weight_transport ipc is memory of this machine, and {far[0]} may be another: choose collective or "
            "disk"
        )


def _engine_groups(job: Job) -> None:
    groups, placement = job.placement.engine_groups, job.placement
    names = [group.name for group in groups]
    for group in groups:
        if names.count(group.name) > 1:
            raise ConfigError(f"two engine groups are called {group.name}: rename one")
        _check_group(group)
    if placement.divides_requests:
        _divided_requests(job)
    elif idle := [name for name in job.sglang if name.startswith("disaggregation_")]:
        raise ConfigError(f"--sglang-{idle[0].replace('_', '-')} has no effect without prefill and decode groups")
    gpus = sum(group.count * group.size for group in groups)
    if groups and gpus != placement.rollout_num_gpus:
        parts = " + ".join(f"{group.name} {group.count * group.size}" for group in groups)
        raise ConfigError(
            f"rollout_num_gpus {placement.rollout_num_gpus} is not what the engine groups have, {parts} = {gpus}: "
            "leave it out, or change a group"
        )


def _are_here(job: Job) -> bool:
    return job.placement.rollout_placement == "local" and not job.placement.rollout_external_engine_addrs


def _draft_model(job: Job) -> None:
    """SGLang loads a folder into the draft model as well: weights of the same names take the place of its own."""
    draft, transport = job.sglang.get("speculative_draft_model_path"), job.publish.update_weight_transport
    if draft is not None and transport in ("disk", "ipc") and not job.debug.debug_rollout_only:
        raise ConfigError(
            f"--sglang-speculative-draft-model-path {draft} with update_weight_transport {transport}: SGLang would "
            "load the policy's weights into the draft model. Pass --update-weight-transport collective, or use "
            "--sglang-speculative-algorithm NGRAM"
        )


def _engine_shapes(job: Job) -> None:
    """What engines of several machines or stages cannot do."""
    for number, shape in enumerate(engine_shapes(job)):
        if shape.nodes > 1 and job.placement.colocate:
            raise ConfigError(
                f"colocate with engine {number} on {shape.nodes} machines: a machine's engines take turns with its own "
                "ranks. Choose engines of one machine with --rollout-num-gpus-per-engine, or leave --colocate out"
            )
        if shape.nodes > 1 and shape.dp_size > 1 and _are_here(job):
            raise ConfigError(
                f"--sglang-dp-size {shape.dp_size} with engine {number} as {shape.nodes} processes of this machine: "
                "SGLang opens the same ports for each of them. Pass --rollout-placement slurm or ray, or leave "
                "--sglang-nnodes out"
            )
        is_sent = job.publish.is_broadcast and not job.debug.debug_rollout_only
        if shape.pp_size > 1 and is_sent:
            raise ConfigError(
                f"--sglang-pp-size {shape.pp_size} with update_weight_transport collective: SGLang gives the same rank "
                "to all stages of an engine, and they could not join the group of weights. Pass "
                "--update-weight-transport disk, or make all GPUs of an engine tensor ranks"
            )


def _divided_requests(job: Job) -> None:
    """What prefill and decode engines need, and what they cannot do."""
    groups = job.placement.engine_groups
    kinds = {group.worker_type for group in groups}
    if kinds != {"prefill", "decode"}:
        raise ConfigError(
            f"engine groups of worker_type {' and '.join(sorted(kinds))}: each request needs a prefill and a decode "
            "engine, and the router knows no others beside them: have groups of these two kinds alone"
        )
    if any(shape.nodes > 1 for shape in engine_shapes(job)):
        raise ConfigError(
            "prefill and decode engines on several machines each were never tried: choose a num_gpus_per_engine of one "
            "machine"
        )
    mode, publishes = job.publish.update_weight_pause_mode, not job.debug.debug_rollout_only
    if publishes and mode != "abort":
        raise ConfigError(
            f"update_weight_pause_mode {mode} with prefill and decode groups: SGLang would say of a response's first "
            "token that it has the new weights, when the old ones made it: pass --update-weight-pause-mode abort"
        )
    for name, is_on in (
        ("colocate", job.placement.colocate),
        ("update_weight_transport adapter", job.publish.update_weight_transport == "adapter"),
        ("use_rollout_routing_replay", job.train.use_rollout_routing_replay),
        ("keep_sampling_mask", job.train.keep_sampling_mask),
        ("multimodal_keys", bool(job.data.multimodal_keys)),
    ):
        if is_on:
            raise ConfigError(f"{name} with prefill and decode groups was never tried: leave one of them out")


def _check_group(group: EngineGroup) -> None:
    where = f"engine group {group.name}: "
    if (why := SLIME["workers"].get(group.worker_type)) is not None:
        raise ConfigError(f"{where}worker_type {group.worker_type} {why}")
    for name, value in group.overrides.items():
        if name in _OF_ALL_ENGINES:
            raise ConfigError(
                f"{where}{name} cannot be of a group, because {_OF_ALL_ENGINES[name]}: pass "
                f"--sglang-{name.replace('_', '-')}"
            )
        _check_argument(name, value, where)


def check_engine_machines(job: Job, scope: Scope) -> None:
    """Raises ConfigError for engines that Ray places where there is no Ray, and that need GPUs where there are none."""
    placement = job.placement
    sizes = sorted({group.size for group in placement.engine_groups})
    if len(sizes) > 1 and not num_gpus():
        scope.missing(
            f"engine groups of {' and '.join(map(str, sizes))} GPUs per engine need GPUs, and this machine has "
            "none: give all groups the same num_gpus_per_engine"
        )
    if not num_gpus() and _are_here(job) and (parts := max(shape.dp_size for shape in engine_shapes(job))) > 1:
        scope.missing(
            f"--sglang-dp-size {parts}: SGLang divides attention only on GPUs, and this machine has none: leave it out"
        )
    if placement.rollout_placement == "slurm" and "SLURM_JOB_NODELIST" not in os.environ:
        scope.missing(
            "rollout_placement slurm starts engines in an allocation, and this process is not in one: see "
            "deploy/slurm/train.sbatch"
        )
    if placement.rollout_placement == "ray":
        if importlib.util.find_spec("ray") is None:
            scope.missing("rollout_placement ray needs the package ray: pip install 'headrace[ray]'")
        if "RAY_ADDRESS" not in os.environ:
            scope.missing(
                "rollout_placement ray starts engines in a cluster that runs: start one with `ray start`, and set "
                "RAY_ADDRESS"
            )
    if (form := QuantizedForm.of(job.model.hf_checkpoint)) is not None:
        _quantized(job, form, scope)


def _quantized(job: Job, form: QuantizedForm, scope: Scope) -> None:
    if not num_gpus():
        scope.missing(
            f"hf_checkpoint {job.model.hf_checkpoint} is in {form}, in which SGLang computes only on a GPU, and "
            "this machine has none: name a folder in bfloat16 or float32"
        )
    if megatron(job.megatron).dtype != "bfloat16":
        raise ConfigError(
            f"hf_checkpoint {job.model.hf_checkpoint} is in {form}, whose other weights SGLang takes in bfloat16, "
            "and the trainer publishes float32: pass --bf16, or name a folder in float32"
        )
    if job.train.true_on_policy_mode:
        raise ConfigError(
            f"true_on_policy_mode with hf_checkpoint {job.model.hf_checkpoint} in {form}: engines round the weights, "
            "and the trainer does not: name a folder in bfloat16, or leave --true-on-policy-mode out"
        )
    if job.publish.update_weight_delta and form.bits != 8:
        raise ConfigError(
            f"update_weight_delta with {form} in hf_checkpoint {job.model.hf_checkpoint}: SGLang repacks INT4 for its "
            "kernels and cannot change some of its values: pass --no-update-weight-delta"
        )


def check_engine_model(job: Job, architecture: Architecture, scope: Scope) -> None:
    """Raises ConfigError for a model that SGLang misreads, or computes only on GPUs, with engines that start here."""
    path = job.model.hf_checkpoint / "config.json"
    if architecture.family == "olmo3" and path.is_file() and "rope_parameters" in json.loads(path.read_text()):
        raise ConfigError(
            f"{path} has rope_parameters, which SGLang does not read for olmo3: engines would serve another model. "
            "Write rope_theta and rope_scaling instead, as the published config.json has them"
        )
    if num_gpus() or not _are_here(job) or "attention_backend" in job.sglang:
        return
    for has_it, what in (
        (architecture.attention_sinks, "attention sinks"),
        (architecture.linear_attention, "linear attention"),
    ):
        if has_it:
            scope.missing(
                f"hf_checkpoint {job.model.hf_checkpoint} ({architecture.family}) has {what}, which SGLang computes "
                "only on a GPU, and this machine has none: start the engines on a machine with one"
            )
    if str(job.sglang.get("speculative_algorithm")).upper() == "NGRAM":
        scope.missing(
            "--sglang-speculative-algorithm NGRAM needs kernels of SGLang's without a build for CPUs, and this "
            "machine has no GPU: leave it out here"
        )


def check_engine_ranks(job: Job, architecture: Architecture, scope: Scope) -> None:
    """Raises ConfigError when an engine's tensor ranks cannot divide the heads. On a CPU, SGLang adds heads."""
    if not num_gpus() and scope.elsewhere is None:
        return
    heads, groups = architecture.num_attention_heads, architecture.num_query_groups
    for shape in dict.fromkeys(engine_shapes(job)):
        ranks = shape.tp_size // shape.dp_size
        if heads % ranks or (groups % ranks and ranks % groups):
            raise ConfigError(
                f"an engine of {shape.devices} GPUs ({shape}) has {ranks} ranks for the {heads} heads in {groups} "
                "groups of this model: choose a --rollout-num-gpus-per-engine with which their number divides both"
            )
