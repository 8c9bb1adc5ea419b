#!/usr/bin/env python3
"""A stand-in for Slurm's srun on one machine: the options that headrace gives, the variables that tasks read.

`--kill-on-bad-exit=1` ends the other tasks; the exit code is the highest of all, as srun's. SIGUSR1 is passed on, and
SIGTERM kills all tasks, as srun does it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int)
parser.add_argument("--ntasks", type=int)
parser.add_argument("--export", choices=["ALL"])
parser.add_argument("--ntasks-per-node", type=int)
parser.add_argument("--kill-on-bad-exit", choices=["1"])
parser.add_argument("--overlap", action="store_true")
parser.add_argument("--output")
parser.add_argument("--open-mode", choices=["append"])
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()

tasks = []
assert args.ntasks == args.nodes * args.ntasks_per_node
for number in range(args.ntasks):
    slurm = {
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % args.ntasks_per_node),
        "SLURM_NTASKS": str(args.ntasks),
        "SLURM_NNODES": str(args.nodes),
        "SLURM_STEP_NODELIST": "localhost" if args.nodes == 1 else f"localhost,other[1-{args.nodes - 1}]",
    }
    with open(args.output.replace("%t", str(number)), "ab") as output:
        tasks.append(subprocess.Popen(args.command, env=os.environ | slurm, stdout=output, stderr=output))


def send(number: int) -> None:
    """To all tasks that run."""
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


signal.signal(signal.SIGUSR1, lambda number, _: send(number))
signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL))
while any(task.poll() is None for task in tasks):
    bad = [number for number, task in enumerate(tasks) if task.poll()]
    if bad:
        print(f"srun: error: localhost: task {bad[0]}: Killed", file=sys.stderr)
        for task in tasks:
            if task.poll() is None:
                task.terminate()
                task.wait()
    time.sleep(0.05)
sys.exit(max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks))
