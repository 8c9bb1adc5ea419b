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
from functools import partial
from pathlib import Path

from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.errors import DeadlineExceeded, DiskFull, NothingToLearn, Unavailable
from headrace.job.schema.job import read_job
from headrace.process.exit_status import ASK_TO_END, PEER_LOST, ExitStatus
from headrace.process.service_main import run_service
from headrace.rpc import tracing
from headrace.rpc.log import configure_logging, log
from headrace.rpc.server import Listen, RpcServer, Service, add_listen_arguments, listen_of
from headrace.run_folder import RunFolder
from services.trainer import loop as training
from services.trainer.control.build import TrainerBuild
from services.trainer.control.channel import PeerLost
from services.trainer.control.ranks import RankGroup, follow, join
from services.trainer.control.worker import RankWorker
from services.trainer.data.buffer import TrainerBuffer
from services.trainer.data.samples import Fetch
from services.trainer.failure_budget import FailureBudget
from services.trainer.ledger import StreamLedger
from services.trainer.megatron.parallel import FILES_TIMEOUT
from services.trainer.model.build import join_ranks
from services.trainer.serving.console import Savable
from services.trainer.serving.servicer import TrainerServicer
from services.trainer.standalone import UntrainedRanks
from services.trainer.tinker.serve import follow_tinker, serve_tinker


async def run_rank0(
    build: TrainerBuild, listen: Listen, buffer: TrainerBuffer, fetch: Fetch, compute: ThreadPoolExecutor
) -> None:
    """Returns when the run is finished or left; raises what ended it otherwise."""
    rollout = build.rollout()
    schedule, report = build.schedule(), build.report()
    console = build.console(report, rollout, schedule)
    for number in ASK_TO_END:
        asyncio.get_running_loop().add_signal_handler(number, console.leave)
    server = _server(listen, TrainerServicer(console, report, build.exports()))
    server.metrics.registry.register(report)
    await server.start(ready=False)

    async def run(ranks: training.Ranks, savable: Savable, world_size: int, step: int) -> None:
        report.resume(step)
        console.open(savable, world_size, step)
        await server.set_ready()
        ledger = StreamLedger(
            buffer, fetch.stream, console, FailureBudget.of(build.job.rollout), build.recorder(buffer, fetch.stream)
        )
        await training.train(ledger, ranks, console, schedule)

    async def train() -> None:
        if build.job.serves_tinker:
            assert rollout is not None, "the job's rules refuse debug_train_only"
            console.open_without_steps(joined.layout.world_size)
            await server.set_ready()
            await serve_tinker(build.job, build.run_dir, listen, rollout, joined, compute, console.until_stopped)
            return
        built = await asyncio.get_running_loop().run_in_executor(compute, build.rank, fetch, joined)
        group = RankGroup(joined.channel, built.worker, compute)
        ranks = build.ranks(group, built, rollout, console)
        async with build.joined(rollout):
            await run(ranks, ranks, built.layout.world_size, built.restored_step)
        await group.gather(FILES_TIMEOUT.total_seconds(), RankWorker.leave)

    try:
        if build.trains:
            await build.clear_devices(rollout)
            joined = await join(partial(join_ranks, build.job), compute)
            await joined.channel.guard(train())
            await joined.channel.close()
        else:
            ranks = UntrainedRanks((await buffer.stats(fetch.stream)).committed_step, build.run_dir)
            await run(ranks, ranks, 0, await ranks.restore())
        if console.verdict:
            raise NothingToLearn(console.verdict)
        console.finished()
    except BaseException as error:
        console.finished(str(error) or type(error).__name__)
        raise
    finally:
        await server.stop()
        if rollout is not None:
            await rollout.close()
        await asyncio.to_thread(build.clear_memory)


def _server(listen: Listen, desk: TrainerServicer) -> RpcServer:
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    return RpcServer(
        "trainer",
        listen.address,
        [Service(desk, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)],
        metrics_address=listen.metrics_address,
        insecure=listen.insecure,
        tls=listen.tls,
        tokens=listen.tokens,
    )


STREAM = "train"
_PEERS_ERRORS = (Unavailable, DeadlineExceeded, DiskFull)
"""A checkpoint that cannot be written is tried again: a full disk that ends the trainer is the buffer's"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run is finished, or was stopped by request; otherwise the code of `exit_status`, and a line says why."""
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
        tracing.start(name, RunFolder(args.run_dir).traces, run=job.run.run_name, ratio=job.tracking.trace_sample_ratio)
        try:
            asyncio.run(run_rank(TrainerBuild(job, args.run_dir), listen_of(vars(args))))
        except PeerLost as error:
            log.error("trainer_failed", reason=error.reason, error=error.message)
            os._exit(PEER_LOST)  # the compute thread may wait for the lost rank in a collective, for minutes

    def ended(code: int, message: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # the disk may be why it ended
                ExitStatus(code, message).write(RunFolder(args.run_dir).exit_status)

    return run_service("trainer", body, peers_errors=_PEERS_ERRORS, ended=ended)


async def run_rank(build: TrainerBuild, listen: Listen) -> None:
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    loop = asyncio.get_running_loop()
    buffer = build.buffer()
    fetch = Fetch(buffer, STREAM, loop)
    if int(os.environ.get("RANK", "0")) == 0:
        await run_rank0(build, listen, buffer, fetch, compute)
    else:
        for number in ASK_TO_END:  # rank 0 is asked too, saves with all ranks, and lets them go
            signal.signal(number, signal.SIG_IGN)
        joined = await join(partial(join_ranks, build.job), compute)

        async def work() -> None:
            if build.job.serves_tinker:
                await follow_tinker(build.job, joined, compute)
                return
            built = await loop.run_in_executor(compute, build.rank, fetch, joined)
            await follow(joined.channel, built.worker, compute)

        await joined.channel.guard(work())
        await joined.channel.close()
    await buffer.close()


if __name__ == "__main__":
    sys.exit(main())
