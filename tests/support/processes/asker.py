"""Asks a server all the while, from a thread of its own, and says how long it took at worst."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

_PAUSE_SECONDS = 0.1


class Asker(ABC):
    """Asks from the start of a `with` block to its end."""

    def __init__(self) -> None:
        self.worst_seconds = 0.0
        self.num_answers = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            self.ask()

    @abstractmethod
    def ask(self) -> None:
        """Asks once, and counts the answer and its seconds."""
