"""What processes take, and what is left: of the machine, or of a container that has less."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.process import child
from headrace.process.child import ResidentMemory
from headrace.process.memory import free_bytes, of_tree

HOLDS_64_MIB = "import sys; held = bytearray(64 << 20); print('.', flush=True); sys.stdin.read()"


async def test_a_process_takes_its_memory_and_that_of_those_below_it() -> None:
    before = of_tree(os.getpid())
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_64_MIB], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        assert 64 << 20 < of_tree(holder.pid) < 256 << 20
        assert of_tree(os.getpid()) > before + (32 << 20)
    finally:
        holder.kill()
        holder.communicate()
    assert of_tree(holder.pid) == 0


async def test_what_a_tree_had_is_told_though_its_largest_process_ended_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = asyncio.Event()
    looks = [500 << 20, 28 << 20, 0]  # the last: nothing of it is there

    def look(pid: int, enough: int) -> int:
        if len(looks) == 1:
            loop.call_soon_threadsafe(over.set)
        return looks.pop(0) if looks else 0

    loop, memory = asyncio.get_running_loop(), ResidentMemory(os.getpid())
    monkeypatch.setattr(child, "of_tree", look)
    monkeypatch.setattr(child, "LOOK_SECONDS", 0.0)
    assert memory.most is None
    await memory.watch(over.wait)
    assert looks == []
    assert memory.most == 500 << 20


def test_what_is_free_is_the_machines_or_the_containers_where_that_is_less(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:      50 kB\n")
    assert free_bytes(tmp_path, tmp_path / "no cgroup") == 50 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path, tmp_path) == 50 << 10
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    (tmp_path / "memory.max").write_text("40000\n")
    assert free_bytes(tmp_path, tmp_path) == 15_000
    (tmp_path / "memory.max").write_text("20000\n")
    assert free_bytes(tmp_path, tmp_path) == 0
    assert free_bytes() > 0
