"""A disk that kills, fails, is full or stalls at every point where the store touches it, under the whole workload.

The same for SQLite: killed before its transaction, inside of it and behind it, told by the system that the disk fails
or is full: on a full disk the buffer waits, and goes on when there is space.

`make chaos` tries every action at every point, `make test` each action at one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from headrace.job.schema.services import BufferSection
from tests.chaos.workload import working
from tests.support.faults.faulty_database import DATABASE_FAILPOINTS
from tests.support.faults.faulty_files import ACTIONS, POINTS
from tests.support.processes.buffer_server import BufferProcess

_FIRST_STEPS = 2
# How often a point is passed before it acts: beyond the start of the buffer, in the middle of the work.
_PASSES = {"create": 3, "created": 3, "sync-folder": 3, "delete": 1}
_MANY_PASSES = 30
_CONTINUES = (":pause:", ":ENOSPC:", "delete:EIO:")
"""Faults with which the buffer continues. A file that cannot be deleted is deleted by the next start."""
_LARGE_CALL_BYTES = 1


_FEW = (
    ("half-written", "kill"), ("synced", "EIO"), ("delete", "ENOSPC"), ("sync-folder", "pause"),
    ("commit", "kill"), ("begin", "EIO"),
)  # fmt: skip


def failpoints() -> Sequence[str]:
    """The name `point:action:pass`."""
    every = os.environ.get("HEADRACE_FAILPOINTS") == "all"
    pairs = (*product(POINTS, ACTIONS), *DATABASE_FAILPOINTS) if every else _FEW
    return [f"{point}:{action}:{_PASSES.get(point, _MANY_PASSES)}" for point, action in pairs]


@pytest.mark.parametrize("failpoint", failpoints())
@pytest.mark.timeout(600)
async def test_nothing_is_lost_or_doubled_by_a_disk_that_fails_at(failpoint: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(50)))
    retained = "services.buffer.build:RETAIN_STEPS=2"
    buffer = BufferProcess(tmp_path, prompts, constants=[retained], buffer=BufferSection(max_staleness=1))
    await buffer.start(failpoint, _LARGE_CALL_BYTES)
    try:
        async with working(buffer, tmp_path) as workload:
            if any(word in failpoint for word in _CONTINUES):
                await workload.steps(4 * _FIRST_STEPS)
                if failpoint.startswith(("delete:EIO:", "delete:ENOSPC:")):
                    assert "payload_file_kept" in buffer.log
            else:
                code = await buffer.wait()
                assert code == (-9 if ":kill:" in failpoint else 1), buffer.log[-2000:]
                await buffer.start()
            await workload.steps(_FIRST_STEPS)
            workload.hand_over()
            await workload.steps(_FIRST_STEPS)
    finally:
        await buffer.kill()
