"""Engines on the machines of the Slurm allocation that this process runs in: `srun` starts a process on each.

The plan is made once: the trainer's ranks have the first GPUs of the first machines, engines what is left. An engine
that ends is started again on the machines that it had.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.devices import ORDER, DeviceShare, Host, machine_of
from headrace.errors import ConfigError, Unavailable
from headrace.rpc.net import Address, free_port
from services.rollout.engine.arguments import EngineOptions
from services.rollout.engine.process import EngineNode, EngineProcess, NodesProcess, SglangProcess, node_log

_ANSWER_SECONDS = 30.0
_NODE = re.compile(r"^NodeName=(\S+).*?\sNodeAddr=(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Machines with their GPUs, and the address at which each is reached."""

    machines: Sequence[Host]
    addresses: Mapping[str, str]

    @classmethod
    def here(cls, num_gpus_per_node: int | None, environment: Mapping[str, str] = os.environ) -> Allocation:
        """That of this process. On machines without GPUs each core counts as one.

        Raises ConfigError outside of an allocation, Unavailable when Slurm does not answer.
        """
        names = environment.get("SLURM_JOB_NODELIST")
        if names is None:
            raise ConfigError(
                "rollout_placement slurm starts engines in an allocation, and this process is not in one: see "
                "deploy/slurm/train.sbatch"
            )
        words = ["scontrol", "--oneliner", "show", "node", names]
        try:
            said = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(
                f"`{' '.join(words)}` does not say where the allocation's machines are: {error}"
            ) from error
        counted = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_CPUS_ON_NODE") or os.cpu_count()
        addresses = dict(_NODE.findall(said))
        return cls([machine_of(name, num_gpus_per_node or int(counted or 1)) for name in addresses], addresses)


def slurm_engine(
    options: EngineOptions,
    engine: int,
    log_dir: Path,
    shares: Sequence[DeviceShare],
    allocation: Allocation,
    *,
    has_accelerator: bool,
) -> EngineProcess:
    """The engine's processes, one on the machine of each share."""
    first, log = allocation.addresses[shares[0].machine], log_dir / f"engine-{engine}.log"
    meets_at, processes = Address(first, free_port()), []
    for rank, share in enumerate(shares):
        node = EngineNode(rank, meets_at, is_far=True, starter=_starter(share, has_accelerator))
        own = replace(options, host=allocation.addresses[share.machine], first_engine=engine, first_gpu=0)
        processes.append(SglangProcess(own, engine, node_log(log, rank), has_accelerator=has_accelerator, node=node))
    return NodesProcess(processes)


def _starter(share: DeviceShare, has_accelerator: bool) -> list[str]:
    """Slurm would set its own CUDA_VISIBLE_DEVICES: `env` comes after it."""
    seen = ORDER | {"CUDA_VISIBLE_DEVICES": share.visible} if has_accelerator else {}
    return [
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={share.machine}", "--overlap", "--export=ALL"),
        *("--kill-on-bad-exit=1", "env", *(f"{name}={value}" for name, value in seen.items())),
    ]
