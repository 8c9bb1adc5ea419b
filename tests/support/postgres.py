"""A throw-away PostgreSQL for as long as the tests run."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from headrace.rpc.net import free_port

_USER = "postgres"  # initdb refuses root


def binaries() -> Path | None:
    """The newest server on this machine; None without one."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    return max(found, default=Path(on_path).parent if on_path else None)


needs_postgres = pytest.mark.skipif(
    binaries() is None, reason="no PostgreSQL server is installed: apt-get install postgresql"
)


@cache
def cluster() -> str:
    """Its DSN. Started once, stopped when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam(_USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
    port = free_port()
    options = f"-c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off -p {port}"
    _run("initdb", "-D", folder / "data", "-A", "trust", "-U", _USER, "--no-sync")
    _run("pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log", "-o", options, "start")
    atexit.register(_stop, folder)
    return f"postgresql://{_USER}@127.0.0.1:{port}/postgres"


def run_postgres(program: str, *arguments: str, standard_input: str = "") -> str:
    """What one of its client programs prints."""
    folder = binaries()
    assert folder
    command = [str(folder / program), *arguments]
    return subprocess.run(command, check=True, input=standard_input, capture_output=True, text=True, timeout=60).stdout


def _stop(folder: Path) -> None:
    _run("pg_ctl", "-D", folder / "data", "-m", "immediate", "stop")
    shutil.rmtree(folder)


def _run(program: str, *arguments: object) -> None:
    folder = binaries()
    assert folder
    user = ["runuser", "-u", _USER, "--"] if os.geteuid() == 0 else []
    command = [*user, str(folder / program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/tmp", timeout=60)
