"""`python -m services.rollout.engine.launch PARENT_PID COMMAND…` becomes COMMAND, and dies with its parent.

A program of its own, because code that runs between fork and exec of a threaded process (preexec_fn) can deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent_pid, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent {parent_pid} ended before its child started")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
