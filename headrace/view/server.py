"""The page of a run while it lives: its files, and data that are read from the run's folder when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from headrace.view.data import LedgerCounts, RunData, script
from headrace.view.folder import DATA, INDEX, STATIC

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_SECONDS = 60.0
"""A browser that is silent for so long is left."""
_LOCAL = ("127.0.0.1", "localhost")

ReadLedger = Callable[[], LedgerCounts | None]


class PageServer(ThreadingHTTPServer):
    """Listens on loopback alone. Port 0: any free one."""

    daemon_threads = True

    def __init__(self, data: RunData, read_ledger: ReadLedger, port: int) -> None:
        super().__init__(
            (_LOCAL[0], port), partial(_Handler, data=data, read_ledger=read_ledger, lock=threading.Lock())
        )

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{_LOCAL[0]}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    protocol_version = "HTTP/1.1"

    def __init__(self, *request: object, data: RunData, read_ledger: ReadLedger, lock: threading.Lock) -> None:
        self._data = data
        self._read_ledger = read_ledger
        self._lock = lock
        super().__init__(*request)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Serves the page's files by their names, and data as scripts."""
        # Another site's page, whose name was made to mean this machine, must not read the samples.
        if (self.headers.get("Host") or "").rpartition(":")[0] not in _LOCAL:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        path = PurePosixPath(unquote(urlsplit(self.path).path))
        body = self._data_of(path.stem) if path.parent.name == DATA else self._file(path.name or INDEX)
        if body is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _TYPES.get(path.suffix or ".html", "application/octet-stream"))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def _data_of(self, name: str) -> bytes | None:
        with self._lock:  # a run's folder is read by one at a time: what was read is kept
            value = self._data.overview(self._read_ledger()) if name == "overview" else self._data.value(name)
        return None if value is None else script(name, value)

    def _file(self, name: str) -> bytes | None:
        files = {file.name: file for file in STATIC.iterdir()}
        return files[name].read_bytes() if name in files else None

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""
