"""The section of a job that says on which machines and devices trainer and engines run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from headrace.job.schema.section import FromJson, NonNegative, Port, Positive, Seconds, Section, normalize


class EngineGroup(Section):
    """A job says either `num_engines` or `num_gpus`; once it is resolved, both and all else is there."""

    name: str = Field("", max_length=64)
    worker_type: Literal["regular", "prefill", "decode", "placeholder"] = "regular"
    """prefill computes the prompts of requests, decode their responses, regular both."""
    num_engines: Positive | None = None
    num_gpus: Positive | None = None
    num_gpus_per_engine: Positive | None = None
    overrides: Annotated[dict[str, Any], AfterValidator(normalize)] = Field({})
    """Arguments of SGLang's, by its names, over those of the job."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Its own arguments of SGLang's, with its part of a request."""
        return {**self.overrides, **({"disaggregation_mode": self.worker_type} if self.is_part else {})}

    @property
    def is_part(self) -> bool:
        """Its engines compute a part of each request."""
        return self.worker_type in ("prefill", "decode")

    @property
    def count(self) -> int:
        """The engines of a resolved group."""
        assert self.num_engines is not None, "the group is not resolved"
        return self.num_engines

    @property
    def size(self) -> int:
        """The tensor-parallel size of a resolved group's engines."""
        assert self.num_gpus_per_engine is not None, "the group is not resolved"
        return self.num_gpus_per_engine


def _no_torchrun(value: Any) -> Any:
    if value == "torchrun":
        raise ValueError("placement torchrun is no longer there: leave placement out, and headrace starts the ranks")
    return value


class NodeOptions(Section):
    node_rank: NonNegative | None = None
    """Which of actor_num_nodes machines this one is, where each starts its own ranks with `headrace up trainer`; 0
    serves and runs the training loop. Absent: NODE_RANK, or 0."""
    master_addr: str | None = None
    """Host or address of machine 0, where ranks of several machines meet. Absent: MASTER_ADDR."""
    master_port: Port | None = None
    """Port at which they meet; free on machine 0. Absent: MASTER_PORT, or 29500."""


class PlacementSection(NodeOptions):
    actor_num_nodes: Positive = 1
    """Machines for the trainer."""
    actor_num_gpus_per_node: Positive = 1
    """The trainer's ranks on each machine: GPUs, or processes on a machine without."""
    num_gpus_per_node: Positive | None = None
    """GPUs of a machine that the job may use, nearest to each other first; absent: all that are there. In a check for
    other machines, the number that each has."""
    rollout_num_gpus: Positive = 1
    """GPUs of all engines of a rollout service together, or processes on a machine without."""
    rollout_num_gpus_per_engine: Positive = 1
    """Tensor-parallel size of an engine."""
    engine_groups: tuple[Annotated[EngineGroup, FromJson], ...] = ()
    """Engines with arguments of their own: tables [[placement.engine_groups]] in the job file, or JSON objects, each
    with name, num_engines or num_gpus, num_gpus_per_engine, and overrides of SGLang's arguments."""
    sglang_config: Path | None = None
    """YAML file of slime's form with one model, whose server_groups are read as engine_groups."""
    rollout_max_engines: Positive | None = None
    """Most engines that `headrace rollout scale` may ask for; absent: on GPUs those of rollout_num_gpus, on a CPU what
    its free memory has room for."""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """host:port of SGLang servers that are started elsewhere, in place of engines started here; several rollout
    services divide them, in their order."""
    colocate: bool = False
    """Trainer and engines take turns on the same GPUs, of one machine or of each of several."""
    offload_train: bool | None = None
    """With colocate: the trainer's memory is in the host's while engines generate; absent: on."""
    offload_rollout: bool | None = None
    """With colocate: engines give up weights and KV cache while the trainer trains; absent: on."""
    placement: Annotated[Literal["local", "slurm", "ray"], BeforeValidator(_no_torchrun)] = "local"
    """Who starts the trainer's ranks: headrace, srun in an allocation, or Ray actors."""
    rollout_placement: Literal["local", "slurm", "ray"] = "local"
    """Who starts the engines: the rollout service on its machine, srun on those of its allocation, or Ray actors on
    machines of the cluster of RAY_ADDRESS. Engines elsewhere listen on their machine's address, without a key."""
    use_fault_tolerance: bool = False
    """A trainer that dies starts again from its last checkpoint, and the ledger rewinds with it."""
    rollout_health_check_interval: Seconds = 2.0
    """Seconds between checks of an engine or router."""
    rollout_health_check_timeout: Seconds = 10.0
    """A check that is not answered within it is missed."""

    @property
    def num_engines(self) -> int:
        """The number of engines behind the router, also of those that are started elsewhere."""
        if self.engine_groups:
            return sum(group.count for group in self.engine_groups)
        return len(self.rollout_external_engine_addrs) or self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def divides_requests(self) -> bool:
        """Each request is computed by two engines."""
        return any(group.is_part for group in self.engine_groups)

    @property
    def engine_sizes(self) -> tuple[int, ...]:
        """The tensor-parallel sizes of its engines, the smallest first."""
        sizes = {group.size for group in self.engine_groups} or {self.rollout_num_gpus_per_engine}
        return tuple(sorted(sizes))

    @property
    def num_ranks(self) -> int:
        """The number of the trainer's processes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node
