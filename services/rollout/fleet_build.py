"""Builds a fleet from a job: the engines of its slots, how many there may be, and who asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from headrace.job.engine_shape import engine_shapes
from headrace.job.megatron import megatron
from headrace.job.model import adapted_names
from headrace.job.rules.machines import plan_on
from headrace.job.rules.training import mask_tokens
from headrace.job.schema.job import Job
from headrace.job.schema.placement import EngineGroup
from headrace.job.schema.production import ContextLimit
from headrace.models.architecture import Architecture
from headrace.models.registry import read_architecture
from headrace.process.computing import threads_of_each
from headrace.process.scratch import delete_scratch
from headrace.rpc.net import Address
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.client import EngineClient
from services.rollout.engine.fleet import EngineSlot, Fleet, FleetTiming, SlotOf
from services.rollout.engine.process import (
    EngineFactory,
    EngineNode,
    EngineProcess,
    ExternalEngine,
    SglangProcess,
    node_log,
    nodes_here,
)
from services.rollout.engine.router import Router
from services.rollout.engine.scaling import Capacity
from services.rollout.engine.slurm_engine import Allocation, slurm_engine
from services.rollout.engine.weights import ServedWeights
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import GRACE_SECONDS, Generator, StopStrings, Turn, request_ender

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The engines, the router in front of them, and the generator that asks it through the client."""

    router: Router
    client: EngineClient
    fleet: Fleet
    weights: ServedWeights
    generator: Generator


def engine_parts(
    job: Job,
    factory: EngineFactory,
    log_dir: Path,
    metrics: RolloutMetrics,
    architecture: Architecture,
    stop_strings: StopStrings,
    turn: Turn,
) -> EngineParts:
    """Starts nothing."""
    timing = FleetTiming.of(job.placement, start_seconds=job.services.start_timeout_seconds)
    request_seconds = job.rollout.generate_timeout_seconds + GRACE_SECONDS
    router = Router(
        job.rollout,
        log_dir / "router.log",
        request_seconds=request_seconds,
        timing=timing,
        divides_requests=job.placement.divides_requests,
    )
    fleet = Fleet(
        job.placement.num_engines if job.asks_engines else 0,
        slots_of(job),
        factory,
        router,
        timing,
        metrics,
        begins_with_checkpoint=not job.placement.rollout_external_engine_addrs,
    )
    return _asking(job, router, fleet, fleet.weights, architecture, stop_strings, turn)


def joined_parts(
    job: Job, shared: EngineParts, run: str, architecture: Architecture, stop_strings: StopStrings, turn: Turn
) -> EngineParts:
    """The same engines for another run, whose adapters they are given."""
    weights = shared.fleet.joined[run] = ServedWeights(run, shared.fleet.weights)
    return _asking(job, shared.router, shared.fleet, weights, architecture, stop_strings, turn)


def _asking(
    job: Job,
    router: Router,
    fleet: Fleet,
    weights: ServedWeights,
    architecture: Architecture,
    stop_strings: StopStrings,
    turn: Turn,
) -> EngineParts:
    client = EngineClient(
        router.url,
        routed_experts=job.train.use_rollout_routing_replay,
        mask_tokens=mask_tokens(job) or 0,
        vocab_size=architecture.vocab_size,
    )
    generator = Generator(
        client,
        weights,
        fleet.suspect,
        context=ContextLimit.of_engines(job.sglang, architecture, job.placement.engine_groups),
        activity=fleet.activity,
        end_request=request_ender(lambda: fleet.engines),
        has_grammars=job.sglang.get("grammar_backend") != "none",
        stop_strings=stop_strings,
        turn=turn,
    )
    return EngineParts(router, client, fleet, weights, generator)


def sglang_factory(job: Job, log_dir: Path, *, has_accelerator: bool, service: int = 0) -> EngineFactory:
    """Makes real engines, or finds those that the job has addresses of.

    Engines of `service`, one of several, have seeds of their own. Their start raises ConfigError for --sglang-* flags
    that SGLang does not know.
    """
    delete_scratch(log_dir, "engine-*")
    if addresses := [Address.parse(text) for text in job.placement.rollout_external_engine_addrs]:
        num_ranks = job.placement.rollout_num_gpus_per_engine
        return lambda number: ExternalEngine(addresses[number], num_ranks)
    options_of = slot_options(job, seed=job.data.rollout_seed + service * job.placement.num_engines)
    if job.placement.rollout_placement == "ray" and job.asks_engines:
        return _ray_factory(options_of, log_dir)
    if job.placement.rollout_placement == "slurm" and job.asks_engines:
        allocation = Allocation.here(job.placement.num_gpus_per_node)
        shares = plan_on(allocation.machines, job).engines[service * job.placement.num_engines :]
        return lambda number: slurm_engine(
            options_of(number), number, log_dir, shares[number], allocation, has_accelerator=has_accelerator
        )
    return lambda number: nodes_here(options_of(number), number, log_dir, has_accelerator=has_accelerator)


def _ray_factory(options_of: Callable[[int], EngineOptions], log_dir: Path) -> EngineFactory:
    from services.rollout.engine.ray_engine import RayEngine, RayNodes, join_cluster  # a package of its own

    has_gpus = join_cluster()

    def factory(number: int) -> EngineProcess:
        options = replace(options_of(number), first_engine=number, first_gpu=0)  # Ray shows it its own GPUs alone
        make, shape = partial(_on_its_machine, options, number, log_dir, has_gpus), options.shape
        num_gpus = shape.devices_per_node if has_gpus else 0
        if shape.nodes == 1:
            return RayEngine(partial(make, None), num_gpus)
        return RayNodes(lambda node: partial(make, node), shape.nodes, num_gpus)

    return factory


def _on_its_machine(
    options: EngineOptions, number: int, log_dir: Path, has_gpus: bool, node: EngineNode | None, host: str
) -> SglangProcess:
    log_dir.mkdir(parents=True, exist_ok=True)
    own, log = replace(options, host=host), node_log(log_dir / f"engine-{number}.log", node.rank if node else 0)
    return SglangProcess(own, number, log, has_accelerator=has_gpus, node=node)


def slots_of(job: Job) -> SlotOf:
    """The slots of the job's engine groups, one after the other; what comes after them is of the last group."""
    slots = [
        EngineSlot(shape, group.name, group.worker_type) if group else EngineSlot(shape)
        for shape, group in zip_longest(engine_shapes(job), _group_of_each(job))
    ]
    return lambda number: _of(slots, number)


def slot_options(job: Job, *, seed: int | None = None) -> Callable[[int], EngineOptions]:
    """The options of each engine by its number: those of the job, with those of its group over them."""
    options, groups, shapes = engine_options(job), _group_of_each(job), engine_shapes(job)
    options = options if seed is None else replace(options, seed=seed)
    if not groups:
        return lambda _: options
    by_group: dict[str, EngineOptions] = {}
    first_engine = first_gpu = 0
    for group in job.placement.engine_groups:
        by_group[group.name] = replace(
            options,
            shape=shapes[first_engine],
            sglang={**options.sglang, **group.arguments},
            first_engine=first_engine,
            first_gpu=first_gpu,
        )
        first_engine, first_gpu = first_engine + group.count, first_gpu + group.count * group.size
    return lambda number: by_group[_of(groups, number).name]


def engine_options(job: Job) -> EngineOptions:
    """Lets engines use all cores where the trainer waits for them (on-policy), and else leave half of them to it."""
    share = 0.5 if job.buffer.max_staleness else 1.0
    has_adapters = job.publish.update_weight_transport == "adapter"
    return EngineOptions(
        hf_checkpoint=job.model.hf_checkpoint,
        shape=engine_shapes(job)[0],
        seed=job.data.rollout_seed,
        sglang=job.sglang,
        dtype=megatron(job.megatron).dtype,
        threads=threads_of_each(job.placement.rollout_num_gpus * job.services.rollout_services, share=share),
        returns_experts=job.train.use_rollout_routing_replay,
        mask_tokens=mask_tokens(job),
        adapter_rank=job.lora.lora_rank if has_adapters else None,
        adapted_layers=adapted_layers(job) if has_adapters else (),
        num_runs=job.services.rollout_runs,
        releases_memory=bool(job.placement.offload_rollout),
    )


def adapted_layers(job: Job) -> list[str]:
    return adapted_names(read_architecture(job.model.hf_checkpoint), job.lora.lora_target_modules)


def capacity(job: Job, *, has_accelerator: bool) -> Capacity:
    """Returns how many engines may be asked for while the job runs."""
    placement = job.placement
    if (
        placement.rollout_placement == "ray" and job.asks_engines
    ):  # whose machines have GPUs and memory that nothing here knows
        return Capacity(most=placement.rollout_max_engines or placement.num_engines)
    is_planned = has_accelerator or placement.rollout_placement == "slurm"
    return Capacity(
        num_slots=placement.num_engines if is_planned else None,
        is_asked=job.asks_engines,
        most=placement.rollout_max_engines,
        elsewhere=bool(placement.rollout_external_engine_addrs),
    )


def _group_of_each(job: Job) -> list[EngineGroup]:
    """The group of each of the job's engines, by number; nothing where it has no groups."""
    return [group for group in job.placement.engine_groups for _ in range(group.count)]


def _of(items: Sequence[T], number: int) -> T:
    return items[min(number, len(items) - 1)]
