"""`python -m services.trainer --config RUN/job.json --address HOST:PORT --run-dir RUN`: one rank of the trainer.

Every rank has an event loop (main thread) and a compute thread. Rank 0's loop serves gRPC and runs the training loop;
the others follow its commands. When one is gone, all end within seconds (`channel`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from headrace.errors import DeadlineExceeded, DiskFull, Unavailable
from headrace.job.load.resolved import read_job
from headrace.process.ending import Ending
from headrace.process.exit_codes import PEER_LOST
from headrace.process.rank_signals import ENDING
from headrace.process.service_main import run_service
from headrace.rpc.listen import Listen, add_listen_arguments, listen_of
from headrace.rpc.log import configure_logging, log
from headrace.run_folder import RunFolder
from services.trainer.control.build import TrainerBuild
from services.trainer.control.channel import PeerLost
from services.trainer.control.lead import lead
from services.trainer.control.rank import meet
from services.trainer.control.rank_group import follow
from services.trainer.data.fetch import Fetch

STREAM = "train"
_PEERS_ERRORS = (Unavailable, DeadlineExceeded, DiskFull)
"""A checkpoint that cannot be written is tried again: a full disk that ends the trainer is the buffer's"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run is finished, or was stopped by request; otherwise the code of `exit_codes`, and a line says why."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved job (JSON)")
    add_listen_arguments(parser, address="127.0.0.1:0")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for metrics, curves and checkpoints")
    args = parser.parse_args(argv)
    name = f"trainer-{os.environ.get('RANK', '0')}"
    configure_logging(name)

    def body() -> None:
        job = read_job(args.config)
        configure_logging(name, run=job.run.run_name)
        try:
            asyncio.run(run_rank(TrainerBuild(job, args.run_dir), listen_of(vars(args))))
        except PeerLost as error:
            log.error("trainer_failed", reason=error.reason, error=error.message)
            os._exit(PEER_LOST)  # the compute thread may wait for the lost rank in a collective, for minutes

    def ended(code: int, message: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # the disk may be why it ended
                Ending(code, message).write(RunFolder(args.run_dir).ending)

    return run_service("trainer", body, peers_errors=_PEERS_ERRORS, ended=ended)


async def run_rank(build: TrainerBuild, listen: Listen) -> None:
    """Builds this rank's share, then leads or follows."""
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    loop = asyncio.get_running_loop()
    buffer = build.buffer()
    fetch = Fetch(buffer, STREAM, loop)
    if int(os.environ.get("RANK", "0")) == 0:
        await lead(build, listen, buffer, fetch, compute)
    else:
        for number in ENDING:  # rank 0 is asked too, saves with all ranks, and lets them go
            signal.signal(number, signal.SIG_IGN)
        met = await meet(build.join, compute)

        async def work() -> None:
            built = await loop.run_in_executor(compute, build.rank, fetch, met)
            await follow(met.channel, built.worker.execute, compute)

        await met.channel.guard(work())
        await met.channel.close()
    await buffer.close()


if __name__ == "__main__":
    sys.exit(main())
