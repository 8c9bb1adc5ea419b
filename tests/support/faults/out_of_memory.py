"""The kernel's own out-of-memory kill, of the process that a test names.

The process goes into a memory cgroup that has no room, as the first to be killed there; then a helper in the same
cgroup asks for memory. Where no memory cgroup can be made (no root), `is_possible` is False.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LIMIT_BYTES = 8 << 20
_ASKS_FOR = 64 << 20
_SECONDS_TO_END = 30.0
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_HELPER = "import sys; sys.stdin.readline(); bytearray(int(sys.argv[1]))"


def is_possible() -> bool:
    """True where this user may make a memory cgroup."""
    try:
        with _cgroup():
            return True
    except OSError:
        return False


def kill_for_memory(pid: int) -> None:
    """Returns when the kernel has killed it. Raises RuntimeError where it killed another one."""
    with _cgroup() as (cgroup, kills):
        helper = subprocess.Popen([sys.executable, "-c", _HELPER, str(_ASKS_FOR)], stdin=subprocess.PIPE)
        try:
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
            for each in (pid, helper.pid):
                (cgroup / "cgroup.procs").write_text(str(each))
            helper.communicate(b"\n", timeout=60)
        finally:
            helper.kill()
            helper.wait()
        if not _num_kills(cgroup / kills):
            raise RuntimeError(f"the kernel killed nothing in {cgroup}")
        until = time.monotonic() + _SECONDS_TO_END
        while _is_there(pid):  # its memory is charged elsewhere: the helper is killed before it is gone
            if time.monotonic() > until:
                raise RuntimeError(f"the kernel killed the helper and not {pid}")
            time.sleep(0.01)


@contextmanager
def _cgroup() -> Iterator[tuple[Path, str]]:
    """A new one with a limit, and the name of the file that counts its kills."""
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    root, limit, kills = (
        (_V1, "memory.limit_in_bytes", "memory.oom_control") if is_v1 else (_V2, "memory.max", "memory.events")
    )
    cgroup = root / f"headrace-test-{uuid.uuid4().hex}"
    cgroup.mkdir()
    try:
        (cgroup / limit).write_text(str(_LIMIT_BYTES))
        yield cgroup, kills
    finally:
        for pid in (cgroup / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it ended meanwhile
                (root / "cgroup.procs").write_text(pid)
        with suppress(OSError):  # the last of them is not quite gone
            os.rmdir(cgroup)


def _num_kills(file: Path) -> int:
    words = dict(line.split() for line in file.read_text().splitlines())
    return int(words["oom_kill"])


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
