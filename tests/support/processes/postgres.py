"""A throw-away PostgreSQL for as long as the tests run."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psycopg
import pytest

from headrace.rpc.net import free_port
from tests.support.processes.leftovers import at_session_end

_USER = "postgres"  # initdb refuses root


def binaries() -> Path | None:
    """The newest server on this machine; None without one."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    return max(found, default=Path(on_path).parent if on_path else None)


needs_postgres = pytest.mark.skipif(
    binaries() is None, reason="no PostgreSQL server is installed: apt-get install postgresql"
)


class PostgresServer:
    """A cluster of its own, to be killed, stopped and started again at the same port."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        if os.geteuid() == 0:
            user = pwd.getpwnam(_USER)
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self._port = free_port()
        _run("initdb", "-D", self._data, "-A", "trust", "-U", _USER, "--no-sync")

    @property
    def dsn(self) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Returns when it answers. One that was killed may hold its memory or port for another moment."""
        options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories={self.folder} -c fsync=off -p {self._port}"
        end = time.monotonic() + 60.0
        while True:
            try:
                _run("pg_ctl", "-D", self._data, "-w", "-l", self.folder / "log", "-o", options, "start")
                return
            except subprocess.CalledProcessError as error:
                if time.monotonic() > end:
                    raise AssertionError((self.folder / "log").read_text()[-4000:]) from error
                time.sleep(0.5)

    def kill(self) -> None:
        """`kill -9` of the server and all its sessions: what the kernel keeps of a machine that fell."""
        pids = self._pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20.0
        while any(_runs(pid) for pid in pids) and time.monotonic() < end:  # the last to end gives back their memory
            time.sleep(0.02)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        """To the server and all its sessions."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_sessions(self, like: str = "%") -> int:
        """pg_terminate_backend of the clients with such a name; how many."""
        with psycopg.connect(self.dsn, autocommit=True) as admin:
            return admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE %s "
                "AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
                (like,),
            ).rowcount

    def stop(self) -> None:
        """For good."""
        self.signal(signal.SIGCONT)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _pids(self) -> list[int]:
        """The server first: it would start its sessions' helpers again."""
        file = self._data / "postmaster.pid"
        if not file.is_file():
            return []
        parent = int(file.read_text().split()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children")
        return [parent, *map(int, children.read_text().split())] if children.is_file() else []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@cache
def cluster() -> str:
    """The DSN of one for tests that leave it alone. Started once, stopped when the session ends."""
    server = PostgresServer()
    server.start()
    at_session_end(server.stop)
    return server.dsn


def run_postgres(program: str, *arguments: str, standard_input: str = "") -> str:
    """What one of its client programs prints."""
    folder = binaries()
    assert folder
    command = [str(folder / program), *arguments]
    return subprocess.run(command, check=True, input=standard_input, capture_output=True, text=True, timeout=60).stdout


def _run(program: str, *arguments: object) -> None:
    folder = binaries()
    assert folder
    user = ["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else []
    command = [*user, str(folder / program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/tmp", timeout=60)
