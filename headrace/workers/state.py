"""What a call may change of its process and the next call must find as it was."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Timers, signal handlers and mask, working directory, umask, recursion limit, environment, standard streams."""

    handlers: dict[int, Any]
    mask: set[int | signal.Signals]
    folder: str
    umask: int
    recursion_limit: int
    environment: dict[str, str]
    streams: tuple[int, int, int]
    texts: list[TextIO]

    @classmethod
    def now(cls) -> ProcessState:
        """Of this process."""
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
            mask=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            folder=os.getcwd(),
            umask=umask,
            recursion_limit=sys.getrecursionlimit(),
            environment=dict(os.environ),
            streams=(_kept(0), _kept(1), _kept(2)),
            texts=[sys.stdout, sys.stderr],
        )

    def restore(self) -> None:
        """Puts all of it back."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have none
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        sys.setrecursionlimit(self.recursion_limit)
        os.umask(self.umask)
        with suppress(OSError):  # the folder may be gone
            os.chdir(self.folder)
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        self._restore_streams()

    def _restore_streams(self) -> None:
        for number, kept in enumerate(self.streams):
            with suppress(OSError):  # the copy was closed too: the worker goes on without
                os.dup2(kept, number)
        sys.stdout, sys.stderr = self.texts
        if sys.stdout.closed or sys.stderr.closed:
            self.texts[:] = sys.stdout, sys.stderr = _text(1), _text(2)


def _text(number: int) -> TextIO:
    return open(number, "w", closefd=False, errors="backslashreplace")


def _kept(number: int) -> int:
    """A copy of a standard stream, which programs that are started do not get."""
    copy = os.dup(number)
    os.set_inheritable(copy, False)
    return copy
