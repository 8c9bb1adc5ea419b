"""A well-behaved client of an HTTP port, which asks all the while from a thread of its own and measures."""

from __future__ import annotations

import http.client
import threading
import time
from types import TracebackType

_PAUSE_SECONDS = 0.1
_MOST_SECONDS = 60.0


class Polite:
    """The slowest answer; one that is refused, or does not come, is a failure."""

    def __init__(self, address: str, path: str) -> None:
        self.worst_seconds = 0.0
        self.num_answers = 0
        self.failures: list[str] = []
        self.address = address
        self.path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)

    def __enter__(self) -> Polite:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._ended.wait(_PAUSE_SECONDS):
            started, connection = time.monotonic(), http.client.HTTPConnection(self.address, timeout=_MOST_SECONDS)
            try:
                connection.request("GET", self.path)
                if (status := connection.getresponse().status) != 200:
                    self.failures.append(f"{self.path}: {status}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{self.path}: {type(error).__name__} {error}")
            finally:
                connection.close()
            self.num_answers += 1
            self.worst_seconds = max(self.worst_seconds, time.monotonic() - started)
