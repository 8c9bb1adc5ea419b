"""`python -m services.rollout.engine.launch PARENT_PID COMMAND…` becomes COMMAND, and dies with its parent.

A program of its own, because code that runs between fork and exec of a threaded process (preexec_fn) can deadlock.
"""

from __future__ import annotations

import os
import signal
import sys

from headrace.process.linux import die_with_parent


def main(arguments: list[str]) -> None:
    parent_pid, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent_pid, signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
