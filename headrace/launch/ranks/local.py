"""`python -m headrace.launch.ranks.local NUM_RANKS LOG_DIR COMMAND…`: a command's ranks on this machine.

As torchrun does it: RANK, WORLD_SIZE and their local twins tell the processes apart. HEADRACE_RENDEZVOUS is where they
find each other. Unlike torchrun it needs no torch (some seconds of every start), keeps exit codes, and says what the
rank that died said last. Rank 0 writes where this process writes, rank n into LOG_DIR/trainer-rank-n.log.

all run → (one ends badly) → the others end by themselves, or are ended after PEER_SECONDS → exit with its code
all run → (SIGTERM or SIGINT, passed on to all) → all have ended → exit
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from headrace.process.ended import meaning
from headrace.process.exit_codes import PEER_LOST
from headrace.process.linux import die_with_parent
from headrace.process.log_file import open_log, tail
from headrace.process.memory import resident_bytes

PEER_SECONDS = 20.0
"""Longer than ranks need to notice that one of them is gone."""


_LAST_LINES = 8
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def main(argv: list[str]) -> int:
    """Returns 0 when all ranks ended well, else the exit code of the first that did not; 128 + n for signal n."""
    num_ranks, log_dir, command = int(argv[0]), Path(argv[1]), argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for, not handled
    rendezvous = new_rendezvous(log_dir)
    try:
        return _Ranks(num_ranks, log_dir, command, rendezvous).wait()
    finally:
        rendezvous.unlink(missing_ok=True)


def new_rendezvous(log_dir: Path) -> Path:
    """The name of a new file. Deletes those of ranks whose launcher was killed."""
    for leftover in log_dir.glob(".rendezvous-*"):
        leftover.unlink(missing_ok=True)
    return log_dir / f".rendezvous-{uuid.uuid4().hex}"


class _Ranks:
    """The processes, and the order in which they failed."""

    def __init__(self, num_ranks: int, log_dir: Path, command: list[str], rendezvous: Path) -> None:
        self._logs = [None, *(log_dir / f"trainer-rank-{rank}.log" for rank in range(1, num_ranks))]
        self._processes = [_start(rank, num_ranks, command, rendezvous, log) for rank, log in enumerate(self._logs)]
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
        print(f"rank {rank} ended with {meaning(code, self._resident.get(rank))}", file=sys.stderr)  # noqa: T201  # to the person who started the ranks
        if log is not None:
            print(f"the end of {log}:\n{tail(log, _LAST_LINES)}", file=sys.stderr)  # noqa: T201  # to the person who started the ranks


def _start(
    rank: int, num_ranks: int, command: list[str], rendezvous: Path, log: Path | None
) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environment = {name: str(value) for name, value in place.items()} | {"HEADRACE_RENDEZVOUS": str(rendezvous)}
    output = None if log is None else open_log(log)
    starter = os.getpid()
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=output,
        stderr=output,
        preexec_fn=lambda: _before_exec(starter),
    )


def _before_exec(starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(starter, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
