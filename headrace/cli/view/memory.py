"""Computes the memory of a job: weights, gradients and optimizer states of each rank, and an engine's weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from headrace.devices import gpu_memory_bytes, num_gpus
from headrace.job.megatron.arguments import megatron
from headrace.job.rules.algorithm_rules import uses_critic, uses_reference
from headrace.job.rules.rules import known_architecture
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.models.folders import SCALE, BlockFp8
from headrace.models.registry import table
from headrace.process.memory import free_bytes

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
    full = parameters / shared * (weight + _FLOAT32 + states)
    trained = full if job.lora.lora_rank is None else frozen
    beside = {
        "critic": full if uses_critic(job) else 0.0,
        "reference": frozen if uses_reference(job) else 0.0,
        "teacher": frozen if job.distillation.use_opd and job.distillation.opd_type == "megatron" else 0.0,
        "old actor": frozen if job.train.keep_old_actor else 0.0,
    }
    engine = parameters * weight / job.placement.engine_sizes[0]
    keeps = job.publish.update_weight_rollback == "host"
    kept = parameters / args.pipeline_model_parallel_size * weight if keeps else 0.0
    return Memory(trained, {name: size for name, size in beside.items() if size}, engine, kept)


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
    needed, free = ranks * found.rank + engines * found.engine, free_bytes()
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
    """Bytes of all weights as they are published; None when this machine knows nothing of the model."""
    weight, form = _BFLOAT16 if megatron(job.megatron).bf16 else _FLOAT32, BlockFp8.of(job.model.hf_checkpoint)
    if form is None:
        parameters = num_parameters(job)
        return None if parameters is None else parameters * weight
    sizes = dict.fromkeys(form.weights, 1) | {name + SCALE: _FLOAT32 for name in form.weights}
    files = job.model.hf_checkpoint.glob("*.safetensors")
    return sum(n * sizes.get(name, weight) for file in files for name, n in _elements(file).items())


def num_parameters(job: Job) -> int | None:
    """Elements of all tensors: from the headers of the safetensors files, else from the architecture."""
    folder = job.model.hf_checkpoint
    counted = [_elements(file) for file in folder.glob("*.safetensors")]
    if found := sum(n for file in counted for name, n in file.items() if not name.endswith(SCALE)):
        return found
    architecture = known_architecture(job)
    return None if architecture is None else table(architecture).num_parameters


def _elements(file: Path) -> dict[str, int]:
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
