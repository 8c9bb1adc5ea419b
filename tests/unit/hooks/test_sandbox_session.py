"""Sandboxes whose folder stays: commands, files, limits, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from headrace.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.hooks.kit import SandboxSession, open_sandbox, sandbox_session
from tests.support.sandboxes import choose_sandbox

FILES = {"add.py": "def add(a, b):\n    return a - b\n", "tests/check.py": "print(open('add.py').read().count('-'))\n"}


@pytest.fixture(autouse=True)
def bubblewrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_sandbox("bubblewrap", monkeypatch)


async def test_files_stay_from_one_command_to_the_next() -> None:
    async with open_sandbox(files=FILES) as box:
        assert (await box.exec("python tests/check.py")).output == "1\n"
        await box.write("add.py", (await box.read("add.py")).replace("-", "+"))
        assert (await box.exec(["python", "tests/check.py"])).output == "0\n"
        await box.exec("mkdir made && echo 7 >made/new.txt")
        assert await box.read("made/new.txt") == "7\n"
        await box.write("deep/er/file name.txt", "é 'quoted' $HOME\n")
        assert await box.read("deep/er/file name.txt") == "é 'quoted' $HOME\n"


async def test_two_sessions_see_nothing_of_each_other() -> None:
    async def written(text: str) -> str:
        async with open_sandbox() as box:
            await box.write("a.txt", text)
            return (await box.exec("sleep 0.1; cat a.txt; ls /tmp")).output

    assert await asyncio.gather(written("one"), written("two")) == ["one", "two"]


async def test_what_a_command_does_wrong_is_its_result() -> None:
    async with open_sandbox() as box:
        assert (await box.exec("echo no >&2; exit 3")).exit_code == 3
        assert (await box.exec("echo no >&2; exit 3")).output == "no\n"
        assert (await box.exec(["nothing-like-it"])).exit_code == 127
        late = await box.exec("sleep 30", seconds=0.3)
        assert (late.exit_code, "longer than 0.3 s" in late.output) == (None, True)
        long = await box.exec("yes | head -c 9000", max_characters=100)
        assert "cut" in long.output
        assert (await box.exec("cat", stdin="said")).output == "said"


async def test_a_file_that_is_not_there_or_too_long_is_named() -> None:
    async with open_sandbox() as box:
        with pytest.raises(NotFound, match=r"none\.txt"):
            await box.read("none.txt")
        await box.exec("head -c 2000000 /dev/zero | tr '\\0' a >long.txt")
        with pytest.raises(InvalidArgument, match=r"long\.txt"):
            await box.read("long.txt")
        with pytest.raises(InvalidArgument, match="below"):
            await box.write("/usr/below", "x")


async def test_the_machine_is_neither_seen_nor_reached_nor_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    async with open_sandbox() as box:
        await box.exec(f"ln -s {secret} link")
        with pytest.raises(NotFound):
            await box.read("link")  # read in the sandbox, where the link leads nowhere
        assert (await box.exec(f"echo x >{secret}")).exit_code != 0
        connect = "import socket; socket.create_connection(('127.0.0.1', 1), 1)"
        assert (await box.exec(["python", "-c", connect])).exit_code != 0
        assert (await box.exec("id -u")).output.strip() != "0"
    assert secret.read_text() == "the secret"


async def test_what_a_command_has_started_ends_with_it() -> None:
    async with open_sandbox() as box:
        await box.exec("(while true; do echo x >>grows; sleep 0.01; done) >/dev/null 2>&1 & sleep 0.3")
        before = await box.exec("wc -c <grows")
        assert (await box.exec("sleep 0.2; wc -c <grows")).output == before.output


async def test_files_of_a_session_are_bounded() -> None:
    async with open_sandbox() as box:
        filled = await box.exec("for n in 1 2 3 4 5 6 7 8 9 10; do head -c 31000000 /dev/zero >$n; done", seconds=30)
        assert filled.exit_code != 0
        assert "MiB of files" in filled.output


async def test_nothing_is_left_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with open_sandbox(files=FILES) as box:
        await box.exec("mkdir -m 0 closed; touch a")
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["../a", "/etc/a", "a/../../b", ""])
async def test_first_files_stay_in_the_folder(path: str) -> None:
    with pytest.raises(InvalidArgument):
        async with open_sandbox(files={path: ""}):
            pass


async def test_without_bubblewrap_a_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("refused", "process"):
        choose_sandbox(kind, monkeypatch)
        with pytest.raises(FailedPrecondition, match="bubblewrap"):
            async with open_sandbox():
                pass


async def test_a_package_provides_a_kind_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    named = EntryPoints([EntryPoint("cloud", f"{__name__}:cloud", sandbox_session.ENTRY_POINTS)])
    monkeypatch.setattr(EntryPoint, "load", lambda self: cloud)
    monkeypatch.setattr(sandbox_session, "entry_points", lambda group: named.select(group=group))
    async with open_sandbox("cloud", files={"a": "1"}, region="north") as box:
        assert (await box.exec("cat a")).output == "1"
    with pytest.raises(InvalidArgument, match="cloud"):
        async with open_sandbox("clout"):
            pass


@contextlib.asynccontextmanager
async def cloud(files: Mapping[str, str], *, region: str) -> AsyncIterator[SandboxSession]:
    assert region == "north"
    async with open_sandbox(files=files) as box:
        yield box


ENGINE = """#!/bin/sh
# Does what a container engine does, with folders in place of containers.
root={root}
echo "$@" >>$root/calls
case $1 in
run) [ "$IMAGE" = none ] && echo no such image >&2 && exit 125
     shift; while [ "$1" != --name ]; do shift; done; mkdir $root/$2; echo $2 ;;
exec) cd $root/$3; shift 3; "$@"; exit $? ;;
rm) rm -rf $root/$3 ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in named podman; what it was asked is in `calls`."""
    (tmp_path / "podman").write_text(ENGINE.format(root=tmp_path))
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


async def test_a_container_is_asked_for_each_command_and_removed(engine: Path) -> None:
    async with open_sandbox("podman", image="small", files=FILES) as box:
        assert (await box.exec("cat add.py && exit 3")).exit_code == 3
        await box.write("b/c.txt", "x")
        assert await box.read("b/c.txt") == "x"
        assert (await box.exec("sleep 30", seconds=0.2)).exit_code is None
    calls = (engine / "calls").read_text().splitlines()
    assert "--network none" in calls[0]
    assert "--cap-drop ALL" in calls[0]
    assert calls[-1].startswith("rm -f")


async def test_a_container_that_does_not_start_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGE", "none")
    with pytest.raises(Unavailable, match="no such image"):
        async with open_sandbox("podman", image="none"):
            pass


async def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FailedPrecondition, match="podman"):
        async with open_sandbox("podman", image="small"):
            pass
