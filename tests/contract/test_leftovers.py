"""The check at the end of a session: processes that tests left are named and killed, and the session fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.process.linux import runs

ROOT = Path(__file__).parents[2]

LEAVE = {
    "a_child": "subprocess.Popen(['sleep', '600'])",
    "a_child_with_a_session_of_its_own": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "a_grandchild_whose_parent_has_ended": "subprocess.run(['sh', '-c', 'sleep 600 >/dev/null 2>&1 &'], check=True)",
    "a_child_of_multiprocessing": (
        "multiprocessing.get_context('spawn').Process(target=time.sleep, args=(600,)).start()"
    ),
    "a_child_with_another_title": (
        "subprocess.run([sys.executable, '-c', 'import os, setproctitle, time; os.fork() and os._exit(0);"
        ' setproctitle.setproctitle(1000 * "x"); time.sleep(600)\'], check=True)'
    ),
    "a_session_of_pytest_that_leaves_a_child": (
        "subprocess.run([sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', 'inner.py'], check=True)"
    ),
}
LEAVE_NOTHING = {
    "a_child_that_is_waited_for": "subprocess.run(['true'], check=True)",
    "a_child_that_ends_when_its_pipe_is_closed": "subprocess.Popen(['cat'], stdin=subprocess.PIPE).stdin.close()",
    "the_tracker_of_multiprocessing": "multiprocessing.get_context('spawn').Lock()",
}
INNER = "import subprocess\ndef test_inner():\n    subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"


def session(folder: Path, statements: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """One that has a test for each statement."""
    tests = [f"def test_{name}():\n    {statement}\n" for name, statement in statements.items()]
    (folder / "test_it.py").write_text("\n".join(["import multiprocessing, subprocess, sys, time", *tests]))
    (folder / "inner.py").write_text(INNER)
    plugins = ("-p", "xdist.plugin", "-p", "tests.support.processes.leftovers", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        text=True,
        timeout=600,
    )


def test_processes_that_tests_leave_are_named_and_killed_and_fail_the_session(tmp_path: Path) -> None:
    ended = session(tmp_path, LEAVE, "-o", "ending_seconds=1", "--numprocesses", "2")
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"{len(LEAVE)} passed" in ended.stdout, "the tests themselves are fine"
    named = re.findall(r"^(\d+) \(parent \d+\) (.+)\n +started by (.+)$", ended.stdout, re.MULTILINE)
    assert {test for _, _, test in named} == {
        *(f"test_it.py::test_{name} (call)" for name in LEAVE if "session_of_pytest" not in name),
        "inner.py::test_inner (call)",
    }
    assert sum("sleep 600" in command for _, command, _ in named) == 4
    assert not any(runs(int(pid)) for pid, _, _ in named)


def test_a_session_whose_processes_end_passes(tmp_path: Path) -> None:
    ended = session(tmp_path, LEAVE_NOTHING, "--numprocesses", "0")
    assert (ended.returncode, "started by" in ended.stdout) == (0, False), ended.stdout
