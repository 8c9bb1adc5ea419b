"""Code of the policy is run apart: it may loop, fork, fill memory and disks, and look around; nothing comes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from headrace.errors import InvalidArgument
from headrace.hooks.kit import run_python, sandbox, sandbox_of
from headrace.process.linux import descendants

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap here")
KINDS = [pytest.param("bubblewrap", marks=needs_bubblewrap), "process"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bubblewrap" and sandbox_of() != "bubblewrap":
        pytest.skip("this machine lets nobody make namespaces")
    monkeypatch.setattr(sandbox, "sandbox_of", lambda: request.param)
    return str(request.param)


async def test_a_program_reads_computes_writes_and_ends(kind: str) -> None:
    ran = await run_python("import sys\nprint(sum(map(int, sys.stdin)))", stdin="3\n4\n")
    assert (str(ran), ran.exit_code) == ("7\n", 0)
    ran = await run_python("raise SystemExit(3)")
    assert (ran.output, ran.exit_code) == ("", 3)
    ran = await run_python("1/0")
    assert ran.exit_code == 1
    assert ran.output.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "while True: print('x' * 100_000)",  # its pipe is full when it ends
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\nwhile True: pass",
        "import os\nfor _ in range(5): os.fork()\nwhile True: pass",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)",
    ],
)
async def test_what_does_not_end_is_ended_with_all_that_it_started(kind: str, code: str) -> None:
    before = set(descendants(os.getpid()))
    ran = await run_python(code, seconds=1.0)
    assert (ran.output, ran.exit_code) == ("error: it ran longer than 1 s", None)
    assert set(descendants(os.getpid())) <= before


async def test_what_outlives_its_program_is_ended(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(60)"
    mark = threading.active_count()
    ran = await run_python(code)
    assert ran.exit_code == 0
    assert threading.active_count() <= mark + 1
    assert not [pid for pid in _all() if bytes(tmp_path) in _command(pid)]


_OTHER_USER = """
import asyncio, concurrent.futures.thread, os, sys, threading, time
from headrace.hooks.kit import run_python, sandbox
sandbox.sandbox_of = lambda: "process"
sys.executable = "/usr/bin/python3"
os.setgid(65534); os.setuid(65534)
for _ in range(100):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(asyncio.run(run_python("import os; print(os.fork() and os.wait()[1])", seconds=30)))
"""


@pytest.mark.skipif(os.getuid() != 0 or not Path("/usr/bin/python3").exists(), reason="only root becomes another user")
def test_a_user_who_runs_much_else_may_still_start_programs_that_fork() -> None:
    ended = subprocess.run([sys.executable, "-c", _OTHER_USER], capture_output=True, text=True, timeout=120, check=True)
    assert "0\n" in ended.stdout, ended.stdout


async def test_memory_files_and_output_are_bounded(kind: str) -> None:
    ran = await run_python("x = bytearray(4 << 30)", memory_bytes=256 << 20)
    assert "MemoryError" in ran.output
    ran = await run_python("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert ran.exit_code not in (0, None)
    ran = await run_python("print('x' * 50_000_000)", max_characters=100)
    assert ran.output == "x" * 100 + "\n… cut: more than 100 characters"


@needs_bubblewrap
@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_nothing_of_the_machine_is_seen_or_changed(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = await run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    assert "refused" in ran.output or "unreachable" in ran.output
    for path in (secret, Path.home() / ".bashrc", "/etc/passwd"):
        assert "No such file" in (await run_python(f"print(open({str(path)!r}).read())")).output
    assert "Read-only file system" in (await run_python("open('/usr/x', 'w')")).output
    assert (await run_python("import os; print(len(os.listdir('/proc')) < 200, dict(os.environ).get('USER'))")).output
    seen = await run_python("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))")
    assert int(seen.output) < 8


async def test_many_run_side_by_side(kind: str) -> None:
    ran = await asyncio.gather(*(run_python(f"print({number} ** 2)", seconds=60) for number in range(12)))
    assert [int(each.output) for each in ran] == [number**2 for number in range(12)]


def test_a_check_says_what_programs_run_in_where_a_function_runs_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("runs", "from headrace.hooks.kit import run_python\n"), ("talks", "")):
        (tmp_path / f"{name}.py").write_text(f"{text}async def generate(args, samples): pass\n")
    assert sandbox.sandbox_used_by(f"{tmp_path}/talks.py:generate") is None
    for kind, said in (("bubblewrap", "bubblewrap: no network"), ("process", "install bubblewrap (bwrap)")):
        monkeypatch.setattr(sandbox, "sandbox_of", lambda kind=kind: kind)
        assert said in str(sandbox.sandbox_used_by(f"{tmp_path}/runs.py:generate"))


async def test_code_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="it may have 1048576 bytes"):
        await run_python("#" * (2 << 20))


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
