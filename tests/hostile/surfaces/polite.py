"""A well-behaved client of an HTTP port, which asks all the while and measures."""

from __future__ import annotations

import http.client
import time

from tests.support.processes.asker import Asker

_MOST_SECONDS = 60.0


class Polite(Asker):
    """The slowest answer; one that is refused, or does not come, is a failure."""

    def __init__(self, address: str, path: str) -> None:
        super().__init__()
        self.failures: list[str] = []
        self.address = address
        self.path = path

    def ask(self) -> None:
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
