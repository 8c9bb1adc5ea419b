"""Saves and restores the state of a worker's process that one call may change and the next must not see."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any, TextIO

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITED = tuple(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))


class ProcessState:
    """Timers, signal handlers and mask, folder, umask, recursion limit, standard streams and limits of this process."""

    def __init__(self) -> None:
        self._streams = tuple(_copied(number) for number in (0, 1, 2))
        self._outputs = sys.stdout, sys.stderr = _output(1), _output(2)
        self.remember()

    def remember(self) -> None:
        """Saves the current state."""
        self._handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._folder = os.getcwd()
        self._umask = _umask()
        self._recursion_limit = sys.getrecursionlimit()
        self._limits = _limits()

    def restore(self) -> bool:
        """Restores the saved state. After False the process must not run another call: some state was not restored."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        sys.setrecursionlimit(max(self._recursion_limit, sys.getrecursionlimit()))
        os.umask(self._umask)
        try:
            os.chdir(self._folder)
            for number, copy in enumerate(self._streams):
                os.dup2(copy, number)
        except OSError:
            return False
        self._restore_outputs()
        return self._limits == _limits()

    def _restore_outputs(self) -> None:
        if any(output.closed for output in self._outputs):
            self._outputs = (_output(1), _output(2))
        sys.stdout, sys.stderr = self._outputs


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(number) for number in _LIMITED]


def _output(number: int) -> TextIO:
    return open(number, "w", closefd=False, errors="backslashreplace")


def _copied(number: int) -> int:
    """A copy of a standard stream, which programs that are started do not get."""
    return os.dup(number)  # not inheritable: PEP 446
