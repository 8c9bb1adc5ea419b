"""A named point in a program, `NAME:ACTION:N`: the N-th time that it is passed, the action is due, once."""

from __future__ import annotations

import os
import signal
import time


class Failpoint:
    """`kill` and `stop` (as kill -9 and kill -STOP do) and `pause` (half a second) are done here.

    What else is due is the caller's to do.
    """

    def __init__(self, words: str) -> None:
        self.point, self.action, count = words.split(":")
        self._left = int(count)

    def passes(self, point: str) -> str | None:
        """The action that the caller must now take, if there is one."""
        if point != self.point:
            return None
        self._left -= 1
        if self._left:
            return None
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "pause":
                time.sleep(0.5)
            case action:
                return action
        return None
