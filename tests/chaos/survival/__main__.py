"""`python -m tests.chaos.survival FOLDER KIND [PHASE…]`: KIND is disk, clock, memory or kill.

All phases if none is named. Prints each outcome and the table; FOLDER/survived.json has them. Exit code 0: the run
went on after every fault, and the audit found nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.survival.campaign import Survived, campaign, table
from tests.chaos.survival.clock import clock_environment
from tests.chaos.survival.faults import ENGINE, PROCESSES, ClockJump, Fault, FullDisk, Killed, KilledLauncher, kill_9
from tests.chaos.survival.phases import PHASES
from tests.support.faults.out_of_memory import kill_for_memory
from tests.support.faults.small_disk import SmallDisk
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.stand_in_run import StandInRun

_FLAGS = ("--num-rollout", "1000000", "--save-interval", "4", "--use-fault-tolerance")
_HOW = {"memory": kill_for_memory, "kill": kill_9}
_JUMPS = (1.0, -1.0, 72.0, -72.0)


async def survive(folder: Path, kind: str, phases: Sequence[str]) -> Survived:
    """Runs it all in `folder`."""
    checkpoint = make_tiny_qwen3(folder / "model")
    constants, environment = tuple[str, ...](), dict[str, str]()
    faults: list[Fault]
    launcher = None
    how = _HOW.get(kind)
    if kind == "disk":
        runs = folder / "runs"
        disk, ledger = SmallDisk(runs, 48), SmallDisk(runs / "survive" / "ledger", 24)
        constants = ("services.buffer.__main__:MIN_FREE_DISK_BYTES=1",)
        faults = [FullDisk("the run's folder", disk), FullDisk("the ledger", ledger)]
    elif kind == "clock":
        offset = folder / "clock"
        environment = clock_environment(offset)
        faults = [ClockJump(offset, hours) for hours in _JUMPS]
    else:
        assert how is not None, kind
        name = {"memory": "out of memory", "kill": "kill -9"}[kind]
        faults = [Killed(name, process, how) for process in (*PROCESSES, ENGINE)]
        launcher = KilledLauncher(name, how)
    run = StandInRun(folder, checkpoint, *_FLAGS, environment=environment, constants=constants)
    return await campaign(run, [(fault, phase) for phase in phases for fault in faults], launcher)


def main(argv: Sequence[str]) -> int:
    folder, kind, phases = Path(argv[0]), argv[1], argv[2:] or [phase for phase in PHASES if phase != "backup"]
    survived = asyncio.run(survive(folder, kind, phases))
    survived.write(folder / "survived.json")
    print(table(survived.outcomes, phases))
    print(survived.audit)
    return 0 if survived.is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
