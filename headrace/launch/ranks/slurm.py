"""`python -m headrace.launch.ranks.slurm NODES RANKS_PER_NODE LOG_DIR COMMAND…`: a job step of Slurm, a task a rank.

The allocation is the one that this process runs in, and rank 0 is on its first machine. Rank n writes
LOG_DIR/trainer-rank-n.log. Ranks find each other through a file with a new name: a job that Slurm has put back into its
queue has the numbers of its job steps again. With `--task RENDEZVOUS COMMAND…` a task becomes a rank: Slurm's variables
are renamed to torchrun's, and the command takes this process's place.

runs → (SIGTERM, which srun passes on to all ranks as SRUN_PASSES_ON) → all have ended → exit with srun's code
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.devices import rank_devices
from headrace.launch.ranks.local import RENDEZVOUS, new_rendezvous, rank_environment
from headrace.process.exit_status import SRUN_PASSES_ON, of_shell
from headrace.process.linux import die_with_parent


def main(argv: list[str]) -> int:
    """Returns the exit code of srun, the highest of all ranks' codes. A task does not return."""
    if argv[0] == "--task":
        os.environ.update(task_environment(os.environ, argv[1]))
        os.execvp(argv[2], argv[2:])
    num_nodes, ranks_per_node, log_dir, command = int(argv[0]), int(argv[1]), Path(argv[2]), argv[3:]
    rendezvous, starter = new_rendezvous(log_dir), os.getpid()
    # Says again all that srun would take from sbatch's variables and that would change the ranks.
    srun = [
        *("srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes * ranks_per_node}"),
        *(f"--ntasks-per-node={ranks_per_node}", "--export=ALL", "--overlap", "--kill-on-bad-exit=1"),
        *(f"--output={log_dir}/trainer-rank-%t.log", "--open-mode=append"),
        *(sys.executable, "-m", "headrace.launch.ranks.slurm", "--task", str(rendezvous)),
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to tell
    step = subprocess.Popen([*srun, *command], preexec_fn=lambda: _before_exec(starter))
    signal.signal(signal.SIGTERM, lambda *_: step.send_signal(SRUN_PASSES_ON))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return of_shell(step.wait())
    finally:
        rendezvous.unlink(missing_ok=True)


def _before_exec(starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(starter, signal.SIGTERM)  # srun then kills its tasks, which may be on other machines


def task_environment(slurm: Mapping[str, str], rendezvous: str) -> dict[str, str]:
    """Translates srun's variables to those that a rank reads.

    The first machine is the one of MASTER_ADDR, and without it the first in Slurm's list.
    """
    num_ranks, num_nodes = int(slurm["SLURM_NTASKS"]), int(slurm["SLURM_NNODES"])
    found = {
        **rank_environment(int(slurm["SLURM_PROCID"]), num_ranks, num_ranks // num_nodes),
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        RENDEZVOUS: rendezvous,
        **rank_devices(slurm),
    }
    if num_nodes > 1 and "MASTER_ADDR" not in slurm:
        found["MASTER_ADDR"] = first_host(slurm["SLURM_STEP_NODELIST"])
    return found


def first_host(node_list: str) -> str:
    """The first host of Slurm's compressed list: `gpu[03-05,9],cpu1` begins with gpu03."""
    prefix, _, numbers = node_list.split(",")[0].partition("[")
    return prefix + re.split(r"[-\]]", numbers)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
