"""`python run_until_signal.py FOLDER`: what `headrace train` does around its services, with a fake one.

No two signals are so close that they are one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from headrace.launch import launcher
from headrace.launch.launcher import until_signal
from headrace.launch.process import ServiceSpec, grace_seconds
from headrace.launch.supervisor import RestartPolicy, Supervisor
from headrace.rpc.net import free_port

folder = Path(sys.argv[1])
launcher._AT_ONCE_SECONDS = 0.0
address = f"127.0.0.1:{free_port()}"
spec = ServiceSpec(
    name="fake",
    command=[
        *(sys.executable, str(Path(__file__).parent / "fake_service.py")),
        *("--address", address, "--children", str(folder / "children")),
    ],
    address=address,
    metrics_address="127.0.0.1:0",
    log_file=folder / "fake.log",
    start_seconds=120.0,
)


def _write_pids(pids: dict[str, int]) -> None:
    (folder / "pids").write_text(json.dumps(pids))


async def main() -> int:
    supervisor = Supervisor(
        [spec],
        None,
        lambda line: print(line, flush=True),
        RestartPolicy(),
        _write_pids,
        grace,
    )
    work = asyncio.create_task(supervisor.run())
    return 0 if await until_signal(work, lambda line: print(line, flush=True), grace) else 130


def grace() -> float:
    return grace_seconds(folder / "metrics.jsonl")


sys.exit(asyncio.run(main()))
