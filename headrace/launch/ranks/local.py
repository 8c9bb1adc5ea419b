"""`python -m headrace.launch.ranks.local NUM_RANKS LOG_DIR COMMAND…`: a command's ranks on this machine.

As torchrun does it: RANK, WORLD_SIZE and their local twins tell the processes apart. HEADRACE_RENDEZVOUS is where they
find each other, or, with `--nodes N --node-rank K --master HOST:PORT` in front, MASTER_ADDR and MASTER_PORT: then each
of N machines starts its own. It imports no torch (5 s of a start), keeps exit codes, and says what the
rank that died said last. The first rank writes where this process writes, rank n into
LOG_DIR/trainer-rank-n.log.

all run → (one ends badly) → the others end by themselves, or are ended after PEER_SECONDS → exit with its code
all run → (SIGTERM or SIGINT, passed on to all) → all have ended → exit
On machines other than 0 the exit code of ranks that others have left is PEER_AWAY: another start waits for machine 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from headrace.process.ended import meaning
from headrace.process.exit_codes import PEER_AWAY, PEER_LOST
from headrace.process.linux import die_with_parent
from headrace.process.log_file import open_log, tail
from headrace.process.memory import resident_bytes
from headrace.rpc.net import Address

PEER_SECONDS = 20.0
"""Longer than ranks need to notice that one of them is gone."""


_LAST_LINES = 8
_RENDEZVOUS = "HEADRACE_RENDEZVOUS"
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(argv: list[str]) -> int:
    """Returns 0 when all ranks ended well, else the exit code of the first that did not; 128 + n for signal n."""
    parser = argparse.ArgumentParser(prog="python -m headrace.launch.ranks.local")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master", type=Address.parse)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for, not handled
    rendezvous = new_rendezvous(args.log_dir)
    meet = {_RENDEZVOUS: str(rendezvous)}
    if args.master is not None:
        meet = {"MASTER_ADDR": args.master.host, "MASTER_PORT": str(args.master.port)}
    num_ranks, first = args.nodes * args.num_ranks, args.node_rank * args.num_ranks
    places = [
        {
            "RANK": str(first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(args.num_ranks),
            **meet,
        }
        for local in range(args.num_ranks)
    ]
    try:
        code = _Ranks(places, args.log_dir, args.command).wait()
    finally:
        rendezvous.unlink(missing_ok=True)
    return PEER_AWAY if code == PEER_LOST and args.node_rank else code


def new_rendezvous(log_dir: Path) -> Path:
    """The name of a new file. Deletes those of ranks whose launcher was killed."""
    for leftover in log_dir.glob(".rendezvous-*"):
        leftover.unlink(missing_ok=True)
    return log_dir / f".rendezvous-{uuid.uuid4().hex}"


class _Ranks:
    """The processes, and the order in which they failed."""

    def __init__(self, places: Sequence[dict[str, str]], log_dir: Path, command: Sequence[str]) -> None:
        """`places`: the variables that tell each rank which one it is, and where it meets the others."""
        self._names = [place["RANK"] for place in places]
        self._logs = [None, *(log_dir / f"trainer-rank-{name}.log" for name in self._names[1:])]
        self._processes = [_start(place, command, log) for place, log in zip(places, self._logs, strict=True)]
        self._failed: list[int] = []
        self._resident: dict[int, int] = {}
        self._deadline: float | None = None

    def wait(self) -> int:
        """Returns when all ranks have ended: the exit code of the rank to blame, or 0."""
        while any(process.poll() is None for process in self._processes):
            self._look_for_failures()
            self._look_at_memory()
            received = signal.sigtimedwait(_SIGNALS, 1.0)
            if received and received.si_signo != signal.SIGCHLD:
                self._signal_all(signal.Signals(received.si_signo))
        self._look_for_failures()
        if not self._failed:
            return 0
        to_blame = min(self._failed, key=lambda rank: self._exit_code(rank) == PEER_LOST)
        self._tell(to_blame)
        return self._exit_code(to_blame)

    def _look_for_failures(self) -> None:
        self._failed += [r for r, process in enumerate(self._processes) if process.poll() and r not in self._failed]
        if self._failed and self._deadline is None:
            self._deadline = time.monotonic() + PEER_SECONDS
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._signal_all(signal.SIGKILL)

    def _look_at_memory(self) -> None:
        for rank, process in enumerate(self._processes):
            self._resident[rank] = resident_bytes(process.pid) or self._resident.get(rank, 0)

    def _exit_code(self, rank: int) -> int:
        code = self._processes[rank].wait()
        return 128 - code if code < 0 else code

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _tell(self, rank: int) -> None:
        code, log = self._exit_code(rank), self._logs[rank]
        said = meaning(code, self._resident.get(rank))
        print(f"rank {self._names[rank]} ended with {said}", file=sys.stderr)  # noqa: T201  # to the person who started the ranks
        if log is not None:
            print(f"the end of {log}:\n{tail(log, _LAST_LINES)}", file=sys.stderr)  # noqa: T201  # to the person who started the ranks


def _start(place: dict[str, str], command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != _RENDEZVOUS}
    output = None if log is None else open_log(log)
    starter = os.getpid()
    return subprocess.Popen(
        command,
        env=inherited | place,
        stdout=output,
        stderr=output,
        preexec_fn=lambda: _before_exec(starter),
    )


def _before_exec(starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(starter, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
