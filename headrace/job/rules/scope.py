"""The services that a command starts on this machine.

Rules that need a file or a device ask here whether it must exist.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from headrace.devices import num_gpus
from headrace.errors import ConfigError
from headrace.job.megatron import megatron
from headrace.job.schema.job import Job

ELSEWHERE = "--elsewhere"
"""The flag of `headrace check` for another machine."""
_ADDRESSED = ("buffer", "reward", "rollout")
_GPU_SGLANG = ("mem_fraction_static", "disable_cuda_graph", "cuda_graph_max_bs", "kv_cache_dtype", "quantization")


@dataclass(frozen=True)
class Scope:
    """The services that start here, and why a job may be checked for another machine.

    With a reason in `elsewhere`, whatever is missing on this machine is noted in `unchecked` and does not refuse the
    job.
    """

    services: Collection[str]
    elsewhere: str | None = None
    unchecked: list[str] = field(default_factory=list)

    @classmethod
    def of_train(cls, job: Job) -> Scope:
        return cls(services_here(job))

    def missing(self, refusal: str, path: Path | None = None) -> None:
        """Raises ConfigError, or notes the refusal when another machine may have what is missing.

        A missing `path` in a folder that exists here is a mistake on every machine.
        """
        if self.elsewhere is None or (path is not None and path.parent.is_dir()):
            raise ConfigError(refusal)
        self.unchecked.append(refusal)


def services_here(job: Job) -> list[str]:
    """The services that `headrace train` starts: those without an address in the job, and the trainer.

    The trainer alone where it trains on recorded steps; no reward service where nothing is scored.
    """
    if job.debug.trains_alone:
        return ["trainer"]
    addresses = job.services.model_dump()
    needed = [name for name in _ADDRESSED if name != "reward" or job.scores]
    return [name for name in needed if addresses[f"{name}_address"] is None] + ["trainer"]


def meant_for_gpus(job: Job) -> str | None:
    """The flag that shows that a job is for a machine with GPUs; None when a CPU would do."""
    args = megatron(job.megatron)
    if flags := args.needs_gpu():
        return flags[0]
    if args.bf16:
        return "--bf16"
    if job.placement.placement in ("slurm", "ray"):
        return f"--placement {job.placement.placement}"
    of_groups = [name for group in job.placement.engine_groups for name in group.overrides]
    if given := [name for name in _GPU_SGLANG if name in (*job.sglang, *of_groups)]:
        return f"--sglang-{given[0].replace('_', '-')}"
    for name in ("actor_num_gpus_per_node", "rollout_num_gpus"):
        count, cores = getattr(job.placement, name), os.cpu_count() or 1
        if count > cores:
            return f"--{name.replace('_', '-')} {count} on {cores} cores"
    return None


def scope_of_check(job: Job, *, elsewhere: bool) -> Scope:
    """The scope of `headrace check`: this machine, unless another was named or the job needs GPUs that it lacks."""
    if elsewhere:
        return Scope(services_here(job), ELSEWHERE)
    reason = None if num_gpus() else meant_for_gpus(job)
    return Scope(services_here(job), reason)
