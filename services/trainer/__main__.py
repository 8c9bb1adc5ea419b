"""`python -m services.trainer --config RUN/job.json --address HOST:PORT --run-dir RUN`: one rank of the trainer.

Every rank has an event loop (main thread) and a compute thread. Rank 0's loop serves gRPC and runs the training loop;
the others follow its commands. When one is gone, all end within seconds (`lifeline`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.client.open import open_buffer
from headrace.client.port import Buffer
from headrace.client.rollout import RolloutClient
from headrace.config.job import Job
from headrace.errors import ConfigError, HeadraceError
from headrace.launch.ranks import PEER_LOST
from headrace.rpc.log import configure_logging, log
from headrace.rpc.net import Address
from headrace.rpc.server import RpcServer, Service
from services.trainer import loop as training
from services.trainer.checkpoint import Checkpoints
from services.trainer.console import TrainerConsole
from services.trainer.control import Control
from services.trainer.crew import Crew, follow
from services.trainer.evaluation import Evaluator
from services.trainer.fetch import Fetch
from services.trainer.ledger import StreamLedger
from services.trainer.lifeline import Lifeline, PeerLost
from services.trainer.parallel import Layout, initialize
from services.trainer.policy import Policy
from services.trainer.publication import Publisher
from services.trainer.ranks import TrainerRanks
from services.trainer.report import Report
from services.trainer.schedule import JobSchedule
from services.trainer.sender import WeightSender
from services.trainer.servicer import TrainerServicer
from services.trainer.trackers import trackers
from services.trainer.worker import Worker

STREAM = "train"
LIFELINE = "lifeline"


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank has once it has met the others."""

    layout: Layout
    control: Control
    lifeline: Lifeline


@dataclass(frozen=True, slots=True)
class Built:
    """What the compute thread builds on every rank."""

    layout: Layout
    control: Control
    worker: Worker
    checkpoints: Checkpoints
    restored_step: int


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run is finished, or was stopped by request. 1: an error, said in one line. PEER_LOST: another rank's."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the resolved job (JSON)")
    parser.add_argument("--address", default="127.0.0.1:0", help="where rank 0 serves")
    parser.add_argument("--metrics-address", default=None, help="where rank 0 shows /metrics")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for metrics, curves and checkpoints")
    parser.add_argument("--insecure", action="store_true", help="allow a routable address without encryption")
    args = parser.parse_args(argv)
    name = f"trainer-{os.environ.get('RANK', '0')}"
    configure_logging(name)
    try:
        job = Job.model_validate_json(args.config.read_text())
        configure_logging(name, run=job.run.run_name)
        asyncio.run(run_rank(job, args))
    except PeerLost as error:
        log.error("trainer_failed", reason=error.reason, error=error.message)
        os._exit(PEER_LOST)  # the compute thread may wait for the lost rank in a collective, for minutes
    except HeadraceError as error:
        log.error("trainer_failed", reason=error.reason, error=error.message)
        print(f"trainer: {error.message}", file=sys.stderr)
        return 1
    return 0


async def run_rank(job: Job, args: argparse.Namespace) -> None:
    """Builds this rank's share, then leads or follows."""
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    loop = asyncio.get_running_loop()
    buffer = open_buffer(_required(job.services.buffer_address, "buffer_address"))
    fetch = Fetch(buffer, STREAM, loop)
    if int(os.environ.get("RANK", "0")) == 0:
        await lead(job, args, buffer, fetch, compute)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 is asked too, saves with all ranks, and lets them go
        met = await meet(job, compute)
        await met.lifeline.guard(_follow(job, args, fetch, compute, met))
        await met.lifeline.close()
    await buffer.close()


async def meet(job: Job, compute: ThreadPoolExecutor) -> Met:
    """Joins the other ranks and watches over them from here on."""
    loop = asyncio.get_running_loop()
    layout = await loop.run_in_executor(compute, initialize, job)
    control = await loop.run_in_executor(compute, Control, layout.rank, layout.device)
    lifeline = Lifeline(layout.rank)
    if layout.rank == 0:
        control.put(LIFELINE, str(await lifeline.listen(control.host)))
    else:
        port = int(await loop.run_in_executor(compute, control.wait_for, LIFELINE))
        await lifeline.connect(control.host, port)
    return Met(layout, control, lifeline)


async def _follow(job: Job, args: argparse.Namespace, fetch: Fetch, compute: ThreadPoolExecutor, met: Met) -> None:
    loop = asyncio.get_running_loop()
    built = await loop.run_in_executor(compute, build, job, args.run_dir, fetch, met)
    await loop.run_in_executor(compute, follow, built.control, built.worker)


async def lead(job: Job, args: argparse.Namespace, buffer: Buffer, fetch: Fetch, compute: ThreadPoolExecutor) -> None:
    """Rank 0: serves at once, builds, runs the loop, ends."""
    rollout = RolloutClient(_required(job.services.rollout_address, "rollout_address"))
    schedule = JobSchedule(job)
    assert job.rollout.rollout_batch_size is not None  # the rules derived it
    report = Report(args.run_dir, trackers(job, args.run_dir))
    console = TrainerConsole(
        report,
        Evaluator(job, rollout, schedule),
        run=job.run.run_name,
        num_steps=schedule.num_steps,
        groups_per_step=job.rollout.rollout_batch_size,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, console.leave)
    desk = TrainerServicer(console, report)
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    server = RpcServer(
        "trainer",
        args.address,
        [Service(desk, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)],
        metrics_address=args.metrics_address,
        insecure=args.insecure,
    )
    await server.start(ready=False)
    try:
        met = await meet(job, compute)

        async def work() -> None:
            built = await asyncio.get_running_loop().run_in_executor(compute, build, job, args.run_dir, fetch, met)
            crew = Crew(built.control, built.worker, compute)
            publisher = Publisher(
                crew,
                built.control,
                rollout,
                job.publish,
                stages=built.layout.pp_size,
                backend="nccl" if built.layout.device.type == "cuda" else "gloo",
            )
            ranks = TrainerRanks(job, crew, publisher, console, args.run_dir, built.checkpoints, built.restored_step)
            report.resume(built.restored_step)
            console.open(ranks, built.layout.world_size)
            await server.set_ready()
            await training.train(StreamLedger(buffer, STREAM, console), ranks, console, schedule)
            await crew.leave()

        await met.lifeline.guard(work())
        await met.lifeline.close()
        console.finished()
    except BaseException as error:
        console.finished(str(error) or type(error).__name__)
        raise
    finally:
        await server.stop()
        await rollout.close()


def build(job: Job, run_dir: Path, fetch: Fetch, met: Met) -> Built:
    """In the compute thread of every rank at once: the policy, its latest checkpoint."""
    layout, control = met.layout, met.control
    policy = Policy.build(job, layout)
    checkpoints = Checkpoints(job, run_dir, layout)
    restored_step = checkpoints.restore_latest(policy)
    sender = WeightSender(
        policy,
        layout,
        control,
        host=_sender_host(job),
        bucket_bytes=job.publish.update_weight_buffer_size,
        timeout_seconds=job.publish.update_weight_timeout_seconds,
    )
    log.info("built", rank=layout.rank, world_size=layout.world_size, restored_step=restored_step)
    return Built(layout, control, Worker(policy, sender, fetch, checkpoints), checkpoints, restored_step)


def _sender_host(job: Job) -> str:
    """Where engines find this rank: loopback when the rollout service is on this machine, else the machine's name."""
    rollout = Address.parse(_required(job.services.rollout_address, "rollout_address"))
    return "127.0.0.1" if rollout.is_loopback else socket.gethostbyname(socket.gethostname())


def _required(address: str | None, leaf: str) -> str:
    if address is None:
        raise ConfigError(
            f"services.{leaf} is not set: start the service and pass --{leaf.replace('_', '-')} host:port"
        )
    return address


if __name__ == "__main__":
    sys.exit(main())
