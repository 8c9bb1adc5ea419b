"""A plugin of pytest: a session ends with a check that no process which its tests started is alive.

A session marks its environment, and every process inherits the mark. At the end of the session, after xdist's workers
have ended, the check looks for the mark in /proc. Such a process is named with the test that started it, it is killed,
and the session fails.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headrace.process.linux import marked, runs

_ENDING_SECONDS = "ending_seconds"
_LOOK_SECONDS = 0.1
_OWN_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

_closers = ExitStack()
_mark = pytest.StashKey[str]()
_killed = pytest.StashKey[list["Leftover"]]()


@dataclass(frozen=True)
class Leftover:
    """A process that is alive after the session, and the test during which it was started."""

    pid: int
    parent: int
    command: str
    test: str

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}) {self.command}\n    started by {self.test}"


def at_session_end(close: Callable[[], object]) -> None:
    """For processes that many tests share: `close` ends them before the check, in each worker of xdist."""
    _closers.callback(close)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Nobody waits where nothing is left, so the default is long."""
    parser.addini(_ENDING_SECONDS, "the time for processes that tests have told to end", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Marks the environment; workers of xdist inherit the mark of their controller."""
    if hasattr(config, "workerinput"):
        return
    # The name is unique, so a session within another one has the marks of both.
    config.stash[_mark] = f"PYTEST_SESSION_{uuid.uuid4().hex}"
    os.environ[config.stash[_mark]] = "1"
    os.environ["SPT_NOENV"] = "1"  # setproctitle, which SGLang and Ray use, would overwrite /proc/PID/environ


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session that leaves processes, and kills them. The controller of xdist has ended its workers before."""
    _closers.close()
    config = session.config
    if _mark not in config.stash or not Path("/proc").exists():
        return
    end = time.monotonic() + float(config.getini(_ENDING_SECONDS))
    while (left := _leftovers(config.stash[_mark])) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    config.stash[_killed] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the processes that were left."""
    if left := terminalreporter.config.stash.get(_killed, []):
        terminalreporter.section("tests left these processes running, they are killed", red=True, bold=True)
        for process in left:
            terminalreporter.line(str(process))


def _leftovers(mark: str) -> list[Leftover]:
    others = [pid for pid in marked(mark, "1") if runs(pid) and pid != os.getpid()]
    return [_described(pid) for pid in others if not is_own_helper(pid)]


def is_own_helper(pid: int) -> bool:
    """True for a process that multiprocessing started in pytest's own process. It ends when that does."""
    command = " ".join(_words(pid, "cmdline"))
    return parent_of(pid) == os.getpid() and any(name in command for name in _OWN_HELPERS)


def _described(pid: int) -> Leftover:
    command, environment = (_words(pid, name) for name in ("cmdline", "environ"))
    tests = [word.partition("=")[2] for word in environment if word.startswith("PYTEST_CURRENT_TEST=")]
    return Leftover(pid, parent_of(pid), " ".join(command), tests[0] if tests else "no test")


def _words(pid: int, name: str) -> list[str]:
    with suppress(OSError):  # it ended while we looked
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    return []


def parent_of(pid: int) -> int:
    """0 for a process that has ended, or that nobody here has started."""
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).ppid())
    return 0
