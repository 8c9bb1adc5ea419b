"""`srun … python -m headrace.launch.ranks.slurm LOG_DIR COMMAND…`: a task of a job step becomes a rank of the trainer.

Slurm's variables are renamed to torchrun's, and the command takes this process's place.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.devices.ranks import rank_devices


def main(argv: list[str]) -> None:
    """Replaces this process by the command."""
    os.environ.update(rank_environment(os.environ, Path(argv[0])))
    os.execvp(argv[1], argv[1:])


def rank_environment(slurm: Mapping[str, str], log_dir: Path) -> dict[str, str]:
    """Translates srun's variables to those that a rank reads.

    Each job step has its own rendezvous, also after a restart.
    """
    step = f"{slurm['SLURM_JOB_ID']}-{slurm['SLURM_STEP_ID']}"
    found = {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_NNODES"])),
        "HEADRACE_RENDEZVOUS": str(log_dir / f".rendezvous-{step}"),
        **rank_devices(slurm),
    }
    if int(slurm["SLURM_NNODES"]) > 1:
        found["MASTER_ADDR"] = first_host(slurm["SLURM_STEP_NODELIST"])
    return found


def first_host(node_list: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],cpu1` begins with gpu03."""
    prefix, _, numbers = node_list.split(",")[0].partition("[")
    return prefix + re.split(r"[-\]]", numbers)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
