"""Limits the processor time of a call, which a busy machine does not use up.

Python code is ended by an exception; a process that is busy in C (a power of huge integers) is killed by the kernel a
moment later: its pool sees it die of `KILLED_BY`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

KILLED_BY = signal.SIGPROF
_GRACE_SECONDS = 0.5
_AGAIN_SECONDS = 0.05  # a library's bare `except:` may swallow the first


class TooSlow(BaseException):
    """The time is used up. It is no Exception, because libraries catch those."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside, or at the end where a library caught it. Use it in the main thread of a worker."""
    is_used_up = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_used_up
        is_used_up = True
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds + _GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)
    if is_used_up:  # its result is of a calculation that was cut short
        raise TooSlow
