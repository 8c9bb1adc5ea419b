"""The page of a run: written as a folder, or served while it lives, with data read when they are asked for."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from headrace.errors import FailedPrecondition
from headrace.view.data import LedgerCounts, RunData, Value, script, step_name

# The page with a run's data beside it: a folder that opens as a file, is copied, or is put on a web server.


STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
DATA = "data"
TOKEN_BYTES = 512 << 20
"""Of all scripts with tokens; the newest steps have theirs."""


def write_page(
    data: RunData, ledger: LedgerCounts | None, target: Path, report: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Returns how many bytes were written. `report` is given how many steps are written, and of how many.

    Raises FailedPrecondition for a folder that holds something else.
    """
    _require_own(target)
    shutil.rmtree(target / DATA, ignore_errors=True)
    (target / DATA).mkdir(parents=True)
    num_bytes = sum(_copy(file, target) for file in sorted(STATIC.iterdir()))
    left, notes = TOKEN_BYTES, list[str]()
    steps, with_tokens = data.log.steps(), set(data.log.steps_with_tokens())
    for done, step in enumerate(reversed(steps)):
        report(done, len(steps))
        has_tokens = False
        if left > 0 and step in with_tokens:
            written = _write(target, step_name("tokens", step), data.tokens(step))
            num_bytes, left, has_tokens = num_bytes + written, left - written, True
        num_bytes += _write(target, step_name("step", step), data.step(step, has_tokens=has_tokens))
        if data.is_traced:
            num_bytes += _write(target, step_name("trace", step), data.trace(step))
        if left <= 0 and not notes:
            notes.append(f"Tokens of steps before {step} are left out: a page has {TOKEN_BYTES >> 20} MiB of them.")
    for name, value in _others(data):
        num_bytes += _write(target, name, value)
    num_bytes += _write(target, "overview", data.overview(ledger, notes))
    report(len(steps), len(steps))
    return num_bytes


def _others(data: RunData) -> Iterator[tuple[str, Value]]:
    for step in data.log.evaluations():
        yield step_name("eval", step), data.evaluation(step)
    yield "untrained", data.untrained()
    yield "prompts", data.prompts()


def _require_own(target: Path) -> None:
    """A folder that is empty, or has an earlier page."""
    if target.is_dir() and any(target.iterdir()) and not (target / DATA / "overview.js").is_file():
        raise FailedPrecondition(f"{target} has files that are no page of headrace view: name an empty folder")


def _copy(file: Path, target: Path) -> int:
    shutil.copyfile(file, target / file.name)
    return file.stat().st_size


def _write(target: Path, name: str, value: Value) -> int:
    return (target / DATA / f"{name}.js").write_bytes(script(name, value))


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
