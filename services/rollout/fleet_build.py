"""Builds the parts of a fleet from a job: the engines of its slots, and how many there may be."""

from __future__ import annotations

from pathlib import Path

from headrace.job.schema.job import Job
from headrace.process.openmp import threads_of_each
from headrace.process.scratch import delete_leftovers
from headrace.rpc.net import Address
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.external import ExternalEngine
from services.rollout.engine.process import EngineFactory, SglangProcess
from services.rollout.engine.scaling.capacity import Capacity


def sglang_factory(job: Job, log_dir: Path, *, has_accelerator: bool) -> EngineFactory:
    """Makes real engines, or finds those that the job has addresses of.

    Their start raises ConfigError for --sglang-* flags that SGLang does not know.
    """
    delete_leftovers(log_dir, "engine-*")
    if addresses := [Address.parse(text) for text in job.placement.rollout_external_engine_addrs]:
        size = job.placement.rollout_num_gpus_per_engine
        return lambda number: ExternalEngine(addresses[number], size)
    options = engine_options(job)
    return lambda number: SglangProcess(
        options, number, log_dir / f"engine-{number}.log", has_accelerator=has_accelerator
    )


def engine_options(job: Job) -> EngineOptions:
    """On-policy, engines use all cores while the trainer waits; otherwise they leave half of them to it."""
    share = 0.5 if job.buffer.max_staleness else 1.0
    return EngineOptions(
        hf_checkpoint=job.model.hf_checkpoint,
        tensor_parallel_size=job.placement.rollout_num_gpus_per_engine,
        seed=job.data.rollout_seed,
        sglang=job.sglang,
        threads=threads_of_each(job.placement.rollout_num_gpus, share=share),
        returns_experts=job.train.use_rollout_routing_replay,
    )


def capacity(job: Job, *, has_accelerator: bool) -> Capacity:
    """How many engines may be asked for while the job runs."""
    placement = job.placement
    return Capacity(
        num_slots=placement.num_engines if has_accelerator else None,
        most=placement.rollout_max_engines,
        elsewhere=bool(placement.rollout_external_engine_addrs),
    )
