"""Starting a few trainer ranks as torchrun would, without their start-up time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.trainer.megatron.rendezvous import RENDEZVOUS
from tests.support.processes.leftovers import at_session_end
from tests.support.ranks.rank_host import Launch, RankHosts

_HOSTS = RankHosts()
at_session_end(_HOSTS.close)


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
    logs = {str(rank): str(folder / f"rank-{world_size}-{rank}.log") for rank in range(world_size)}
    failed = folder / f"a-rank-of-{world_size}-failed"
    environment = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    codes = _HOSTS.run(Launch(module, str(script), logs, str(failed), timeout_seconds, environment))
    assert set(codes.values()) == {0}, "\n".join(
        f"rank {rank}: {codes[rank]}: {Path(log).read_text()[-3000:]}" for rank, log in logs.items()
    )


def entries(script: Path) -> Iterator[dict[str, Any]]:
    """In a rank: the cases of a script as run_cases wrote it, each with a meeting place of its own."""
    for number, entry in enumerate(json.loads(script.read_text())):
        os.environ[RENDEZVOUS] = str(script.with_name(f"{script.stem}-meets-{number}"))
        yield entry
