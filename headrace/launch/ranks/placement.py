"""Builds the start of the trainer's command line: the program that starts its ranks, and the machines.

local     headrace.launch.ranks.local: this machine, or this one's of several that each start their own.
slurm     headrace.launch.ranks.srun: the machines of the allocation that this process runs in.
ray       headrace.launch.ranks.ray: a placement group of the Ray cluster.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping

from headrace.errors import ConfigError
from headrace.job.rules.machines.nodes import meeting_of
from headrace.job.schema.placement import PlacementSection
from headrace.run_folder import RunFolder


def starter(placement: PlacementSection, folder: RunFolder) -> list[str]:
    """The words before `python -m services.trainer …`.

    Raises ConfigError when this machine cannot start ranks this way.
    """
    return _STARTERS[placement.placement](placement, folder)


def _local(placement: PlacementSection, folder: RunFolder) -> list[str]:
    run, count = [sys.executable, "-m", "headrace.launch.ranks.local"], str(placement.actor_num_gpus_per_node)
    if (meeting := meeting_of(placement)) is not None:
        run += [
            f"--nodes={placement.actor_num_nodes}",
            f"--node-rank={meeting.node_rank}",
            f"--master={meeting.address}",
        ]
    return [*run, count, str(folder.logs)]


def _slurm(placement: PlacementSection, folder: RunFolder) -> list[str]:
    if shutil.which("srun") is None:
        raise ConfigError("placement slurm needs srun, which this machine does not have", field="placement")
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "placement slurm starts ranks in an allocation, and this process is not in one: see "
            "deploy/slurm/train.sbatch",
            field="placement",
        )
    return [
        *(sys.executable, "-m", "headrace.launch.ranks.srun"),
        *(str(placement.actor_num_nodes), str(placement.actor_num_gpus_per_node), str(folder.logs)),
    ]


def _ray(placement: PlacementSection, folder: RunFolder) -> list[str]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("placement ray needs the package ray: pip install 'headrace[ray]'", field="placement")
    return [
        *(sys.executable, "-m", "headrace.launch.ranks.ray"),
        *(str(placement.actor_num_nodes), str(placement.actor_num_gpus_per_node), str(folder.logs)),
    ]


_STARTERS: Mapping[str, Callable[[PlacementSection, RunFolder], list[str]]] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
}
