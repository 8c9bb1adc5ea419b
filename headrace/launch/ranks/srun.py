"""`python -m headrace.launch.ranks.srun NODES RANKS_PER_NODE LOG_DIR COMMAND…`: a job step of Slurm, a task a rank.

The allocation is the one that this process runs in, and rank 0 is on its first machine. Rank n writes
LOG_DIR/trainer-rank-n.log. Ranks find each other through a file with a new name: a job that Slurm has put back into its
queue has the numbers of its job steps again.

runs → (SIGTERM, which srun passes on to all ranks as FORWARDED) → all have ended → exit with srun's code
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.launch.ranks.local import new_rendezvous
from headrace.process.linux import die_with_parent
from headrace.process.rank_signals import FORWARDED


def main(argv: list[str]) -> int:
    """Returns the exit code of srun: the highest of all ranks' codes."""
    num_nodes, ranks_per_node, log_dir, command = int(argv[0]), int(argv[1]), Path(argv[2]), argv[3:]
    rendezvous, starter = new_rendezvous(log_dir), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to tell
    step = subprocess.Popen(
        [*_srun(num_nodes, ranks_per_node, log_dir), *_task(rendezvous), *command],
        preexec_fn=lambda: _before_exec(starter),
    )
    signal.signal(signal.SIGTERM, lambda *_: step.send_signal(FORWARDED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        code = step.wait()
    finally:
        rendezvous.unlink(missing_ok=True)
    return 128 - code if code < 0 else code


def _srun(num_nodes: int, ranks_per_node: int, log_dir: Path) -> Sequence[str]:
    """Says again all that srun would take from sbatch's variables and that would change the ranks."""
    return [
        *("srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes * ranks_per_node}"),
        *(f"--ntasks-per-node={ranks_per_node}", "--export=ALL", "--overlap", "--kill-on-bad-exit=1"),
        *(f"--output={log_dir}/trainer-rank-%t.log", "--open-mode=append"),
    ]


def _task(rendezvous: Path) -> Sequence[str]:
    return [sys.executable, "-m", "headrace.launch.ranks.slurm", str(rendezvous)]


def _before_exec(starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(starter, signal.SIGTERM)  # srun then kills its tasks, which may be on other machines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
