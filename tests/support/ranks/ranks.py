"""Starting a few trainer ranks as torchrun would, without its own start-up time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.trainer.megatron.rendezvous import RENDEZVOUS

REPOSITORY = Path(__file__).resolve().parents[3]


def run_cases(
    folder: Path,
    world_size: int,
    cases: Sequence[Any],
    timeout_seconds: float = 840.0,
    module: str = "tests.support.ranks.rank_cases",
) -> None:
    """Every rank runs the cases (dataclasses of the module) one after the other.

    Raises AssertionError with a rank's last lines when one fails.
    """
    script = folder / f"cases-{world_size}.json"
    script.write_text(json.dumps([asdict(case) for case in cases]))
    logs = [folder / f"rank-{world_size}-{rank}.log" for rank in range(world_size)]
    processes = [_start(module, rank, world_size, script, log) for rank, log in enumerate(logs)]
    deadline = time.monotonic() + timeout_seconds
    try:
        codes = _wait(processes, deadline)
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)


def entries(script: Path) -> Iterator[dict[str, Any]]:
    """In a rank: the cases of a script as run_cases wrote it, each with a meeting place of its own."""
    for number, entry in enumerate(json.loads(script.read_text())):
        os.environ[RENDEZVOUS] = str(script.with_name(f"{script.stem}-meets-{number}"))
        yield entry


def _start(module: str, rank: int, world_size: int, script: Path, log: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(REPOSITORY),
    }
    with log.open("wb") as output:
        command = [sys.executable, "-m", module, str(script)]
        return subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes; a rank that failed ends the wait for the others, who would wait for it in a collective."""
    codes: list[int | None] = []
    for process in processes:
        if any(codes):
            codes.append(process.poll())
            continue
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes
