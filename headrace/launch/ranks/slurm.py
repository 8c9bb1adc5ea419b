"""`srun … python -m headrace.launch.ranks.slurm RENDEZVOUS COMMAND…`: a task of a job step becomes a rank.

Slurm's variables are renamed to torchrun's, and the command takes this process's place. The first machine is the one of
MASTER_ADDR, and without it the first in Slurm's list.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from headrace.devices import rank_devices


def main(argv: list[str]) -> None:
    """Replaces this process by the command."""
    os.environ.update(rank_environment(os.environ, argv[0]))
    os.execvp(argv[1], argv[1:])


def rank_environment(slurm: Mapping[str, str], rendezvous: str) -> dict[str, str]:
    """Translates srun's variables to those that a rank reads."""
    found = {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_NNODES"])),
        "HEADRACE_RENDEZVOUS": rendezvous,
        **rank_devices(slurm),
    }
    if int(slurm["SLURM_NNODES"]) > 1 and "MASTER_ADDR" not in slurm:
        found["MASTER_ADDR"] = first_host(slurm["SLURM_STEP_NODELIST"])
    return found


def first_host(node_list: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],cpu1` begins with gpu03."""
    prefix, _, numbers = node_list.split(",")[0].partition("[")
    return prefix + re.split(r"[-\]]", numbers)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
