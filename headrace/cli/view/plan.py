"""Describes a resolved job before it starts: its plan, its memory, and what its services found in a check."""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.cli.view.lines import print_no_wrap
from headrace.devices import DevicePlan, DeviceShare, gpu_memory_bytes, num_gpus
from headrace.job.engine_shape import EngineShape, engine_shapes
from headrace.job.eval_sets import eval_sets
from headrace.job.megatron import OPTIMIZER_ON_GPU, megatron
from headrace.job.model import adapted_layers
from headrace.job.rules.files import where_code_runs
from headrace.job.rules.machines import cluster_plan, device_plan
from headrace.job.rules.rules import known_architecture
from headrace.job.rules.scope import ELSEWHERE, Scope
from headrace.job.rules.training import uses_critic, uses_reference
from headrace.job.schema.job import Job
from headrace.job.schema.placement import EngineGroup
from headrace.launch.specs import SERVICES, address_in
from headrace.limits import encodable, share_of_count
from headrace.models import packed_int4
from headrace.models.folders import SCALE, QuantizedForm
from headrace.models.packed_int4 import PACKED, SHAPE
from headrace.models.registry import table
from headrace.preflight import Report
from headrace.process.linux import free_bytes
from headrace.rpc.proxies import NO_PROXY, proxies, uses_proxy
from headrace.run_folder import RunFolder

_PACKAGES = ("headrace", "torch", "megatron-core", "transformers", "sglang", "sglang-router", "grpcio")


def plan(job: Job, scope: Scope | None = None) -> list[tuple[str, str]]:
    """Pairs (what, how) in the order of reading."""
    return [
        ("run", f"{job.run.folder}, seed {job.run.seed}"),
        ("model", f"{job.model.hf_checkpoint}, {_parameters(job)}"),
        *([("remote code", code)] if (code := where_code_runs(job)) else []),
        ("services", "; ".join(f"{name} {_where(job, name)}" for name in SERVICES)),
        *_proxies(job),
        *_shards(job),
        *([("Tinker's API", _tinker(job))] if job.serves_tinker else _learning(job)),
        ("trainer", _trainer(job, scope)),
        *_rollout_services(job),
        ("engines", _engines(job)),
        *_gpus(job, scope),
        ("weights", _weights(job)),
        *([] if job.serves_tinker else _production(job)),
        *_adapters(job),
        ("memory", _memory(job)),
        ("versions", f"Python {sys.version.split()[0]}, {', '.join(_versions())}"),
    ]


def _learning(job: Job) -> list[tuple[str, str]]:
    return [("algorithm", _algorithm(job)), ("loss", _loss(job))]


def _production(job: Job) -> list[tuple[str, str]]:
    return [
        ("batch", _batch(job)),
        ("staleness", _staleness(job)),
        ("prompts", _prompts(job)),
        *_images(job),
        ("reward", _reward(job)),
        ("evaluation", _evaluation(job)),
    ]


def _tinker(job: Job) -> str:
    tinker = job.tinker
    return (
        f"at {tinker.tinker_host}:{tinker.tinker_port}: {tinker.tinker_models} models at once, of rank 1 … "
        f"{job.lora.lora_rank}; clients say what is generated and trained"
    )


def _where(job: Job, service: str) -> str:
    needed = job.scores or service != "reward"
    return address_in(job, service) or ("started here" if needed else "not needed")


def _reward(job: Job) -> str:
    if not job.asks_engines:
        return "none: conversations are trained as they are given"
    if address := address_in(job, "reward"):
        return f"by the service at {address}"
    return job.reward.custom_rm_path or job.reward.rm_type or "by each prompt's metadata.rm_type"


def _proxies(job: Job) -> list[tuple[str, str]]:
    """Nothing where the environment has no proxy."""
    found = proxies()
    if not found.keys() - {NO_PROXY}:
        return []
    named = {"rm_url": job.reward.rm_url, "judge_url": job.reward.judge_url}
    ways = [
        f"{name} {url} is asked {'through it' if uses_proxy(url) else 'directly'}" for name, url in named.items() if url
    ]
    given = ", ".join(f"{name}={value}" for name, value in found.items())
    return [("proxy", "; ".join([f"{given} in the environment", "the run's own addresses never use it", *ways]))]


def _shards(job: Job) -> list[tuple[str, str]]:
    """Nothing for one buffer."""
    num_shards, groups = job.num_shards, job.rollout.groups_per_step
    if num_shards == 1:
        return []
    most, least = (share_of_count(groups, shard, num_shards) for shard in (0, num_shards - 1))
    share = f"{most}" if most == least else f"{most} or {least}"
    return [("buffer shards", f"{num_shards}, each with {share} of the {groups} groups of a step")]


def _gpus(job: Job, scope: Scope | None) -> list[tuple[str, str]]:
    """Nothing where it is not known which GPUs there are."""
    found = cluster_plan(job) or device_plan(job, scope or Scope.of_train(job))
    if found is None:
        return []
    who = "trainer and engines in turns" if job.placement.colocate else "trainer"
    trainer = [f"{who} {_share(share, found)}" for share in found.trainer]
    engines = [
        f"engine {number} {' and '.join(_share(share, found) for share in shares)}"
        for number, shares in enumerate(found.engines)
    ]
    return [("GPUs", "; ".join([*trainer, *engines]))]


def _share(share: DeviceShare, plan: DevicePlan) -> str:
    """Names the machine where the plan has several."""
    machines = {each.machine for each in (*plan.trainer, *chain(*plan.engines))}
    return f"{share.machine} {share}" if len(machines) > 1 else str(share)


def _rollout_services(job: Job) -> list[tuple[str, str]]:
    """Returns nothing where there is one rollout service."""
    count = job.services.num_rollout_services
    if count == 1:
        return []
    return [("rollout services", f"{count} on one ledger; the line about engines is that of each of them")]


def _images(job: Job) -> list[tuple[str, str]]:
    """What becomes of the vision tower, and of images. Nothing for a model of text."""
    found = known_architecture(job)
    if found is None or found.vision is None:
        return []
    frozen = "the language part is trained; the vision tower is frozen, and exported as it is"
    if (key := job.data.image_key) is None:
        return [("images", f"{frozen}; no --multimodal-keys: prompts of files are text")]
    return [("images", f"of each row's {key!r}, where its prompt says <image>; {frozen}")]


def in_short(job: Job) -> str:
    """The plan in one line."""
    rollout = job.rollout
    num_services = job.services.num_rollout_services
    engines = (
        "no engine"
        if not job.asks_engines
        else _count(_engines_of_each(job), "engine")
        + (f" in each of {num_services} rollout services" if num_services > 1 else "")
    )
    shards = f"{job.num_shards} buffer shards, " if job.num_shards > 1 else ""
    return (
        f"{job.model.hf_checkpoint.name}, {_parameters(job)}: {rollout.num_rollout} steps of "
        f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples, "
    ) + (
        _alone(job)
        or (
            f"{_count(job.placement.num_ranks, 'trainer rank')}, {engines}, {shards}"
            f"{_meaning(job.buffer.max_staleness)}"
        )
    )


def _alone(job: Job) -> str | None:
    """Says what a part of a run does by itself."""
    if job.debug.debug_rollout_only:
        return "generation alone: nothing is trained"
    if (pattern := job.debug.load_debug_rollout_data) is not None:
        return f"{_count(job.placement.num_ranks, 'trainer rank')} on the steps of {pattern}: nothing is generated"
    return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parameters(job: Job) -> str:
    found = num_parameters(job)
    return "size unknown here" if found is None else f"{found / 1e6:,.1f} M parameters"


def _algorithm(job: Job) -> str:
    train = job.train
    if train.loss_type == "sft_loss":
        return "supervised fine-tuning" + (f", masks of {train.loss_mask_type}" if train.loss_mask_type else "")
    parts: list[str] = [train.advantage_estimator]
    if uses_critic(job):
        start = job.critic.critic_load or job.model.hf_checkpoint
        parts.append(f"critic from {start}, lr {job.critic.critic_lr:g}, value clip {job.critic.value_clip:g}")
    if job.distillation.use_opd:
        parts.append(f"distilled from a teacher ({job.distillation.opd_type}), weight {job.distillation.opd_kl_coef:g}")
    if job.train.disable_grpo_std_normalization:
        parts.append("advantages not divided by the group's deviation")
    return ", ".join([*parts, *(["advantages whitened"] if train.normalize_advantages else [])])


def _loss(job: Job) -> str:
    train = job.train
    if train.loss_type != "policy_loss":
        return job.hooks.custom_loss_function_path or train.loss_type
    high = train.eps_clip if train.eps_clip_high is None else train.eps_clip_high
    parts = [f"ratio clipped to {1 - train.eps_clip:g} … {1 + high:g}", _kl(job)]
    if train.use_tis:
        parts.append(f"importance weights ({train.tis_mode}) up to {train.tis_clip:g}")
    if train.entropy_coef:
        parts.append(f"entropy bonus {train.entropy_coef:g}")
    parts.append("mean over tokens" if train.calculate_per_token_loss else "mean over rollouts")
    return ", ".join(parts)


def _kl(job: Job) -> str:
    train = job.train
    if not uses_reference(job):
        return "no KL to a reference"
    where = job.model.ref_load or "the starting weights"
    if train.kl_coef > 0:
        return f"KL to {where} in the reward, weight {train.kl_coef:g}"
    return f"KL ({train.kl_loss_type}) to {where} in the loss, weight {train.kl_loss_coef:g}"


def _trainer(job: Job, scope: Scope | None) -> str:
    args = megatron(job.megatron)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    data = job.placement.num_ranks // (tensor * pipeline * args.context_parallel_size)
    on_gpus = num_gpus() or (scope is not None and scope.elsewhere)
    where = f"{'GPUs' if on_gpus else 'CPU processes'}, placement {job.placement.placement}"
    layout = f"data {data} x tensor {tensor} x pipeline {pipeline}"
    layout += f" x context {args.context_parallel_size}" if args.context_parallel_size > 1 else ""
    layout += f", experts over {args.expert_model_parallel_size}" if args.expert_model_parallel_size > 1 else ""
    return f"{_count(job.placement.num_ranks, 'rank')} ({where}): {layout}; lr {args.lr:g} {args.lr_decay_style}"


def _engines(job: Job) -> str:
    if not job.asks_engines:
        return "none: conversations are trained as they are given, and nothing is evaluated"
    shapes, groups = engine_shapes(job), job.placement.engine_groups
    if groups:
        first = accumulate((group.count for group in groups), initial=0)
        own = "".join(f"\n{_group(group, shapes[number])}" for group, number in zip(groups, first, strict=False))
        return f"{job.placement.num_engines} behind the router ({job.rollout.router_policy}), in groups:{own}"
    count, addresses = _engines_of_each(job), ", ".join(job.placement.rollout_external_engine_addrs)
    where = f", started elsewhere: {addresses}" if addresses else ""
    return f"{count}{where} behind the router ({job.rollout.router_policy}), {shapes[0]} in each"


def _engines_of_each(job: Job) -> int:
    """Returns the number of engines of each rollout service; external engines are divided over all services."""
    elsewhere = len(job.placement.rollout_external_engine_addrs)
    return elsewhere // job.services.num_rollout_services or job.placement.num_engines


def _group(group: EngineGroup, shape: EngineShape) -> str:
    own = ", ".join(f"{name} {value}" for name, value in group.overrides.items()) or "the job's arguments"
    kind = f"{group.worker_type} engine" if group.is_part else "engine"
    return f"{group.name}: {_count(group.count, kind)} of {shape}, {own}"


def _weights(job: Job) -> str:
    if not job.asks_engines:
        return "stay in the trainer: there is no engine to give them to"
    form, way = QuantizedForm.of(job.model.hf_checkpoint), _way(job)
    if form is None:
        return way
    each = (version_bytes(job) or 0) / 1e6
    share = f"{len(form.weights)} of {form.num_tensors} tensors"
    return f"{way}; engines serve {form}: {share}, {each:,.1f} MB a publication"


def _way(job: Job) -> str:
    publish = job.publish
    changed = ""
    if publish.update_weight_delta:
        much = megatron(job.megatron).bf16 or QuantizedForm.of(job.model.hf_checkpoint) is not None
        changed = "; what changed alone" if much else "; the whole each time, as in float32 nearly all values change"
    if publish.is_broadcast:
        return "broadcast to the engines" + changed
    folder = RunFolder.of(job).weights_of(publish)
    size = version_bytes(job)
    each = "a version's size is unknown here" if size is None else f"{gigabytes(size)} a version"
    if publish.update_weight_transport == "ipc":
        return f"through shared memory in {folder}: {each}, and two versions lie there"
    what = "adapters alone, no engine stands still, " if publish.update_weight_transport == "adapter" else ""
    return (
        f"{what}through files in {folder}, which trainer and engines must see: {each}, and two versions lie there "
        f"during a publication{changed}"
    )


def _batch(job: Job) -> str:
    rollout, train = job.rollout, job.train
    return (
        f"{rollout.num_rollout} steps of {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples"
        f" = {train.num_steps_per_rollout} optimizer steps x {train.global_batch_size} samples; {_micro(job)}"
    )


def _micro(job: Job) -> str:
    if job.train.use_dynamic_batch_size:
        return f"micro-batches of up to {job.train.max_tokens_per_gpu:,} tokens"
    return f"micro-batches of {job.train.micro_batch_size}"


def _staleness(job: Job) -> str:
    staleness = job.buffer.max_staleness
    return f"at most {staleness} steps ({_meaning(staleness)})"


def _meaning(staleness: int) -> str:
    return {0: "synchronous, on-policy", 1: "one step off"}.get(staleness, "asynchronous")


def _prompts(job: Job) -> str:
    files, weights = job.data.prompt_data, job.data.prompt_data_weights
    if not files:
        return "by SubmitPrompts only (headrace submit)"
    if len(files) == 1:
        return files[0]
    shares = weights or (1.0,) * len(files)
    return ", ".join(f"{share / sum(shares):.0%} {file}" for file, share in zip(files, shares, strict=True))


def _evaluation(job: Job) -> str:
    intervals: dict[int | None, list[str]] = {}
    for each in eval_sets(job.eval):
        intervals.setdefault(each.interval or job.eval.eval_interval, []).append(each.name)
    return "; ".join(f"{', '.join(names)}: {_every(interval)}" for interval, names in intervals.items()) or "none"


def _every(interval: int | None) -> str:
    return f"every {interval} steps" if interval else "before the first and after the last step"


def _adapters(job: Job) -> list[tuple[str, str]]:
    """Nothing without LoRA, and where the model is not known."""
    trained, parameters = num_adapter_parameters(job), num_parameters(job)
    if trained is None or parameters is None:
        return []
    layers = ", ".join(job.lora.lora_target_modules)
    return [
        (
            "LoRA",
            f"rank {job.lora.lora_rank} on {layers}: {trained:,} trained parameters, {trained / parameters:.2%} of "
            f"{parameters:,}",
        )
    ]


def _memory(job: Job) -> str:
    found = memory(job)
    if found is None:
        return "unknown: the model is not on this machine; pass --model NAME to have it computed"
    beside = "".join(f", {name} {gigabytes(size)}" for name, size in found.beside.items())
    kept = f"; {gigabytes(found.kept)} of host memory for each stage's copy of the served weights" if found.kept else ""
    kept += f"; {gigabytes(found.offloaded)} of host memory for each rank's optimizer" if found.offloaded else ""
    engines = f" and {gigabytes(found.engine)} of weights for each of an engine's processes" if job.asks_engines else ""
    return (
        f"about {gigabytes(found.rank)} for each trainer rank (policy {gigabytes(found.policy)}{beside}){engines}, "
        f"before activations and KV cache{kept}; this machine has {gigabytes(free_bytes())} free"
    )


def _versions() -> Sequence[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return found


_FLOAT32, _BFLOAT16 = 4, 2
_BEFORE = "before activations and KV cache"
_WAY_OUT = "use fewer ranks or engines, a smaller model, or another machine"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes before activations. A rank holds the policy and the models beside it."""

    policy: float
    beside: dict[str, float]
    engine: float
    """Weights of each of its processes, before its KV cache."""
    kept: float
    """Host memory of each pipeline stage's sender, for a copy of the served weights."""
    offloaded: float
    """Host memory of each rank, for its optimizer and a copy of the gradients."""

    @property
    def rank(self) -> float:
        """Sum over the models that a trainer's rank holds."""
        return self.policy + sum(self.beside.values())


def memory(job: Job) -> Memory | None:
    """None when this machine knows nothing of the model."""
    parameters = num_parameters(job)
    if parameters is None:
        return None
    args = megatron(job.megatron)
    weight = _BFLOAT16 if args.bf16 else _FLOAT32
    shared = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    data = job.placement.num_ranks // (shared * args.context_parallel_size)
    # Gradients in float32 and Adam's two moments; in bfloat16 a float32 master copy is stored beside them.
    states = (3 if args.bf16 else 2) * _FLOAT32 / (data if args.use_distributed_optimizer else 1)
    frozen = parameters / shared * weight
    offloads = bool(args.given(OPTIMIZER_ON_GPU).get("optimizer_cpu_offload"))
    on_device = 0.0 if offloads else states
    full = parameters / shared * (weight + _FLOAT32 + on_device)
    adapters = num_adapter_parameters(job)
    trained, copy = full, frozen
    if adapters is not None:
        trained = frozen + adapters / shared * (weight + _FLOAT32 + on_device)
        copy = adapters / shared * weight
    beside = {
        "critic": full if uses_critic(job) else 0.0,
        "reference": (copy if job.model.ref_load is None else frozen) if uses_reference(job) else 0.0,
        "teacher": frozen if job.distillation.use_opd and job.distillation.opd_type == "megatron" else 0.0,
        "old actor": copy if job.train.keep_old_actor else 0.0,
    }
    engine = parameters * weight / job.placement.engine_sizes[0]
    keeps = job.publish.update_weight_rollback == "host" or job.publish.update_weight_delta
    kept = parameters / args.pipeline_model_parallel_size * weight if keeps else 0.0
    held = parameters if adapters is None else adapters
    offloaded = held / shared * (states + _FLOAT32) if offloads else 0.0
    return Memory(trained, {name: size for name, size in beside.items() if size}, engine, kept, offloaded)


def too_little_memory(job: Job, scope: Scope) -> list[str]:
    """Warns where what starts here needs more than this machine has: than each GPU, or else than its free memory."""
    found = memory(job)
    if found is None:
        return []
    ranks, engines = _processes(job, scope)
    if num_gpus():
        largest = max(found.rank if ranks else 0.0, found.engine if engines else 0.0)
        has = gpu_memory_bytes()
        if has is None or largest <= has:
            return []
        return [
            f"{_first(found, largest)} needs about {gigabytes(largest)} {_BEFORE}, and a GPU here has {gigabytes(has)}"
        ]
    needed, free = ranks * (found.rank + found.offloaded) + engines * found.engine, free_bytes()
    if needed <= free:
        return []
    counts = ((ranks, "trainer rank", "trainer ranks"), (engines, "engine process", "engine processes"))
    who = " and ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts if count)
    return [
        f"memory: {who} of about {gigabytes(needed)} together, {_BEFORE}, and this "
        f"machine has {gigabytes(free)} free: {'the other one needs more' if scope.elsewhere else _WAY_OUT}"
    ]


def _first(found: Memory, largest: float) -> str:
    return "a trainer rank" if largest == found.rank else "an engine's process"


def _processes(job: Job, scope: Scope) -> tuple[int, int]:
    """The ranks and the engines' processes of one machine."""
    placement = job.placement
    ranks = placement.actor_num_gpus_per_node if "trainer" in scope.services else 0
    is_elsewhere = bool(placement.rollout_external_engine_addrs)
    starts_engines = "rollout" in scope.services and job.asks_engines and not is_elsewhere
    engines = placement.rollout_num_gpus * job.services.rollout_services if starts_engines else 0
    return 0 if job.debug.debug_rollout_only else ranks, engines


def gigabytes(size: float) -> str:
    """`0.54 GB`, `41 GB`."""
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"


def version_bytes(job: Job) -> int | None:
    """Bytes of all that is published; None when this machine knows nothing of the model."""
    weight, form = _BFLOAT16 if megatron(job.megatron).bf16 else _FLOAT32, QuantizedForm.of(job.model.hf_checkpoint)
    if job.publish.update_weight_transport == "adapter":
        adapters = num_adapter_parameters(job)
        return None if adapters is None else adapters * weight
    if form is None:
        parameters = num_parameters(job)
        return None if parameters is None else parameters * weight
    sizes = dict.fromkeys(form.weights, 1)
    for name in form.weights:
        sizes |= {name + SCALE: _FLOAT32, name + PACKED: _FLOAT32, name + SHAPE: _FLOAT32}
    files = job.model.hf_checkpoint.glob("*.safetensors")
    return sum(n * sizes.get(name, weight) for file in files for name, n in _elements(file).items())


def num_parameters(job: Job) -> int | None:
    """Elements of all tensors: from the headers of the safetensors files, else from the architecture."""
    folder = job.model.hf_checkpoint
    counted = [_elements(file) for file in folder.glob("*.safetensors")]
    if found := sum(_weights_in(name, n) for file in counted for name, n in file.items()):
        return found
    architecture = known_architecture(job)
    return None if architecture is None else table(architecture).num_parameters


def _weights_in(name: str, elements: int) -> int:
    """What quantized weights have beside them is none, and a packed element is eight."""
    if name.endswith((SCALE, f".weight{packed_int4.SCALE}", f".weight{SHAPE}")):
        return 0
    return 8 * elements if name.endswith(f".weight{PACKED}") else elements


def num_adapter_parameters(job: Job) -> int | None:
    """Elements of every A and B; None without LoRA, and where the model is not known."""
    architecture, rank = known_architecture(job), job.lora.lora_rank
    if architecture is None or rank is None:
        return None
    return rank * sum(sum(layer.shape) for layer in adapted_layers(architecture, job.lora.lora_target_modules))


def _elements(file: Path) -> dict[str, int]:
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}


_INDENT = 2


def print_report(console: Console, plan: Sequence[tuple[str, str]], report: Report, scope: Scope) -> None:
    """The first line says for which machine, where it is not this one; the verdict is the last line."""
    if scope.elsewhere:
        print_no_wrap(console, Text(_for_another_machine(scope.elsewhere), style="bold yellow"))
        console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, how in _rows(plan, report):
        table.add_row(what, Text(encodable(how)))
    print_no_wrap(console, table)
    _lines(console, "unchecked", report.unchecked)
    _lines(console, "warnings", report.warnings, "yellow")
    _lines(console, "refused", report.refusals, "red")
    _lines(console, "this check failed, which is a bug: please report it", report.failed, "red")
    if not report.refusals and not report.failed:
        here = "that can be checked here " if scope.elsewhere else ""
        console.print(Text(f"nothing {here}prevents a start", style="bold green"))


def report_tree(plan: Sequence[tuple[str, str]], report: Report, scope: Scope) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "elsewhere": scope.elsewhere,
        "plan": {what: encodable(how) for what, how in _rows(plan, report)},
        "unchecked": report.unchecked,
        "warnings": report.warnings,
        "refused": report.refusals,
        "failed": report.failed,
    }


def _rows(plan: Sequence[tuple[str, str]], report: Report) -> list[tuple[str, str]]:
    """What a service has found replaces the plan's own row."""
    replaced = {what for what, _ in report.facts}
    return [*(row for row in plan if row[0] not in replaced), *report.facts]


def _for_another_machine(why: str) -> str:
    reason = "" if why == ELSEWHERE else f"it has {why}, and this machine has no GPU"
    return (
        f"This job is checked for another machine ({reason or ELSEWHERE}): files and devices that are missing here are "
        "listed as unchecked, and do not refuse it."
    )


def _lines(console: Console, title: str, lines: Sequence[str], style: str = "bold") -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style=style))
    for line in lines:
        print_no_wrap(console, Padding(Text(encodable(line)), (0, 0, 0, _INDENT)))
