"""The shape of an engine: over how many machines its GPUs lie, and what each GPU computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.job.schema.job import Job


@dataclass(frozen=True, slots=True)
class EngineShape:
    """`devices` are those of all its machines: GPUs, or processes on a machine without."""

    devices: int
    pp_size: int = 1
    """Pipeline stages."""
    dp_size: int = 1
    """Parts of the tensor ranks that each compute the attention of requests of their own."""
    nodes: int = 1
    """Machines, each with a process of SGLang's that starts the ranks there."""

    @property
    def tp_size(self) -> int:
        """Tensor ranks of each stage."""
        return self.devices // self.pp_size

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    def __str__(self) -> str:
        """`2 stages of 8 tensor-parallel processes on 2 machines`."""
        stages = f"{self.pp_size} stages of " if self.pp_size > 1 else ""
        attention = f", their attention in {self.dp_size} parts," if self.dp_size > 1 else ""
        machines = f" on {self.nodes} machines" if self.nodes > 1 else ""
        return f"{stages}{self.tp_size} tensor-parallel processes{attention}{machines}"

    @classmethod
    def of(
        cls,
        devices: int,
        sglang: Mapping[str, Any],
        gpus_per_node: int | None = None,
        name: str = "rollout_num_gpus_per_engine",
    ) -> EngineShape:
        """Reads SGLang's arguments; without `nnodes` an engine lies on as few machines as it fits on.

        `name` is the option that says `devices`. Raises ConfigError for sizes that do not divide each other.
        """
        pp_size, dp_size = sglang.get("pp_size", 1), sglang.get("dp_size", 1)
        fewest = -(-devices // gpus_per_node) if gpus_per_node else 1
        nodes = sglang.get("nnodes", fewest)
        if devices % pp_size:
            raise ConfigError(f"{name} {devices} cannot be divided by --sglang-pp-size {pp_size}: change one of them")
        if devices % nodes:
            raise ConfigError(
                f"{name} {devices} cannot be divided over {nodes} machines"
                + (f" of {gpus_per_node} GPUs" if gpus_per_node else "")
                + ": each has as many of an engine's GPUs as the others. Change it, or --sglang-nnodes"
            )
        if gpus_per_node and devices // nodes > gpus_per_node:
            raise ConfigError(
                f"--sglang-nnodes {nodes}: each machine would have {devices // nodes} GPUs of an engine ({name} "
                f"{devices}), and num_gpus_per_node is {gpus_per_node}: pass --sglang-nnodes {fewest} or more"
            )
        if pp_size % nodes and nodes % pp_size:
            raise ConfigError(
                f"--sglang-pp-size {pp_size} over {nodes} machines: SGLang puts whole stages on a machine, or a stage "
                "on whole machines. Choose a multiple or a divisor of their number"
            )
        shape = cls(devices, pp_size, dp_size, nodes)
        shape._require_attention(bool(sglang.get("enable_dp_attention")), name)
        return shape

    def _require_attention(self, is_divided: bool, name: str) -> None:
        if self.dp_size > 1 and not is_divided:
            raise ConfigError(
                f"--sglang-dp-size {self.dp_size} would put {self.dp_size} engines behind one address, and the router "
                "spreads requests over engines: start more of them with --rollout-num-gpus, or divide the attention of "
                "each with --sglang-enable-dp-attention"
            )
        if is_divided and self.dp_size == 1:
            raise ConfigError(
                "--sglang-enable-dp-attention has no effect with --sglang-dp-size 1: say into how many parts the "
                "tensor ranks are divided with --sglang-dp-size, or leave it out"
            )
        if self.tp_size % self.dp_size:
            raise ConfigError(
                f"--sglang-dp-size {self.dp_size} does not divide the {self.tp_size} tensor ranks of an engine "
                f"({name} {self.devices}): choose a divisor"
            )


def parts_of(job: Job) -> Sequence[Sequence[int]]:
    """The GPUs of each of a rollout service's engines on each of its machines. Raises ConfigError."""
    return [[shape.devices_per_node] * shape.nodes for shape in engine_shapes(job)]


def engine_shapes(job: Job) -> Sequence[EngineShape]:
    """The shape of each of a rollout service's engines, by number, also of those that are started elsewhere.

    There is at least one. Raises ConfigError.
    """
    placement = job.placement
    limit = placement.num_gpus_per_node
    if not placement.engine_groups:
        shape = EngineShape.of(placement.rollout_num_gpus_per_engine, job.sglang, limit)
        return [shape] * max(placement.num_engines, 1)
    return [
        EngineShape.of(
            group.size,
            {**job.sglang, **group.overrides},
            limit,
            f"engine group {group.name}: num_gpus_per_engine",
        )
        for group in placement.engine_groups
        for _ in range(group.count)
    ]
