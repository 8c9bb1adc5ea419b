"""`python run_supervisor.py FOLDER`: a launcher of one fake service, to be killed from outside."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from headrace.launch.process import ServiceSpec
from headrace.launch.supervisor import RestartPolicy, Supervisor
from headrace.rpc.net import free_port

folder = Path(sys.argv[1])
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


asyncio.run(Supervisor([spec], None, lambda line: print(line, flush=True), RestartPolicy(), _write_pids).run())
