"""`PYTHON -m headrace.cli.environment_host RUN`: an agent host that begins with its run; its log is agents.log."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from headrace.cli.main import main
from headrace.cli.runs import find_run
from headrace.launch.health import is_serving
from headrace.run_folder import ROLLOUT, RunFolder

_POLL_SECONDS = 0.2


def wait_for(run: RunFolder, starter: int) -> bool:
    """Returns True once the run's rollout service serves, False when the starter ended before."""
    while os.getppid() == starter:
        if run.services_file.is_file():
            entry = find_run(str(run.path)).running_services().get(ROLLOUT)  # with the run's certificates
            if entry is not None and asyncio.run(is_serving(entry.address)):
                return True
        time.sleep(_POLL_SECONDS)
    return False


if __name__ == "__main__":
    folder = RunFolder(Path(sys.argv[1]))
    if wait_for(folder, os.getppid()):
        with (folder.logs / "agents.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.exit(main(["agent", str(folder.path)]))
