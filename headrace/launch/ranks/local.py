"""`python -m headrace.launch.ranks.local NUM_RANKS LOG_DIR COMMAND…`: a command's ranks on this machine.

As torchrun does it: RANK, WORLD_SIZE and their local twins tell the processes apart. HEADRACE_RENDEZVOUS is where they
find each other, or, with `--nodes N --node-rank K --master HOST:PORT` in front, MASTER_ADDR and MASTER_PORT: then each
of N machines starts its own. It imports no torch (5 s of a start), keeps exit codes, and says what the rank that died
said last. The first rank writes where this process writes, rank n into LOG_DIR/trainer-rank-n.log.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.process.exit_status import PEER_AWAY, PEER_LOST, meaning, of_shell
from headrace.process.linux import die_with_parent, resident_bytes
from headrace.process.log_file import open_log, tail
from headrace.rpc.net import Address

PEER_SECONDS = 20.0
"""Longer than ranks need to notice that one of them is gone."""
RENDEZVOUS = "HEADRACE_RENDEZVOUS"
_LAST_LINES = 8
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
    join = {RENDEZVOUS: str(rendezvous)}
    if args.master is not None:
        join = {"MASTER_ADDR": args.master.host, "MASTER_PORT": str(args.master.port)}
    first = args.node_rank * args.num_ranks
    environments = [
        rank_environment(first + local, args.nodes * args.num_ranks, args.num_ranks) | join
        for local in range(args.num_ranks)
    ]
    try:
        code = _Ranks(first, environments, args.log_dir, args.command).wait()
    finally:
        rendezvous.unlink(missing_ok=True)
    return PEER_AWAY if code == PEER_LOST and args.node_rank else code


def rank_environment(rank: int, num_ranks: int, ranks_per_node: int) -> dict[str, str]:
    """The variables, named as torchrun does, that tell a rank which one it is."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }


def new_rendezvous(log_dir: Path) -> Path:
    """The name of a new file. Deletes those of ranks whose launcher was killed."""
    for orphan in log_dir.glob(".rendezvous-*"):
        orphan.unlink(missing_ok=True)
    return log_dir / f".rendezvous-{uuid.uuid4().hex}"


def rank_log(log_dir: Path, rank: int) -> Path:
    return log_dir / f"trainer-rank-{rank}.log"


def rank_to_blame(exit_codes: Mapping[int, int]) -> int:
    """The first of ranks that failed, in their order, whose end is not another's."""
    return min(exit_codes, key=lambda rank: exit_codes[rank] == PEER_LOST)


def tell_of_end(rank: int, how: str, log: Path | None) -> None:
    """Says to the person who started the ranks how one ended, with the end of its log."""
    print(f"rank {rank} ended with {how}", file=sys.stderr)  # noqa: T201
    if log is not None:
        print(f"the end of {log}:\n{tail(log, _LAST_LINES)}", file=sys.stderr)  # noqa: T201


class _Ranks:
    """The processes, and in which order they failed."""

    def __init__(
        self, first: int, environments: Sequence[Mapping[str, str]], log_dir: Path, command: Sequence[str]
    ) -> None:
        """`first` is the first one's rank."""
        ranks = range(first, first + len(environments))
        self._logs = {rank: None if rank == first else rank_log(log_dir, rank) for rank in ranks}
        self._processes = {
            rank: _start(command, environment, self._logs[rank])
            for rank, environment in zip(ranks, environments, strict=True)
        }
        self._failed: dict[int, int] = {}
        self._resident: dict[int, int] = {}
        self._deadline: float | None = None

    def wait(self) -> int:
        """Returns when all ranks have ended: the exit code of the rank to blame, or 0."""
        while any(process.poll() is None for process in self._processes.values()):
            self._look()
            received = signal.sigtimedwait(_SIGNALS, 1.0)
            if received and received.si_signo != signal.SIGCHLD:
                self._signal_all(signal.Signals(received.si_signo))
        self._look()
        if not self._failed:
            return 0
        rank = rank_to_blame(self._failed)
        tell_of_end(rank, meaning(self._failed[rank], self._resident.get(rank)), self._logs[rank])
        return self._failed[rank]

    def _look(self) -> None:
        for rank, process in self._processes.items():
            if (code := process.poll()) is None:
                self._resident[rank] = resident_bytes(process.pid) or self._resident.get(rank, 0)
            elif code and rank not in self._failed:
                self._failed[rank] = of_shell(code)
        if self._failed and self._deadline is None:
            self._deadline = time.monotonic() + PEER_SECONDS
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != RENDEZVOUS}
    output, starter = None if log is None else open_log(log), os.getpid()
    return subprocess.Popen(
        command,
        env={**inherited, **environment},
        stdout=output,
        stderr=output,
        preexec_fn=lambda: _before_exec(starter),
    )


def _before_exec(starter: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(starter, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
