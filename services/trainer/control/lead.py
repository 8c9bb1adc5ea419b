"""What rank 0 does beside its share of the work: it serves gRPC at once, runs the training loop, and ends the run."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.client.port import Buffer
from headrace.client.rollout import RolloutClient
from headrace.errors import NothingToLearn
from headrace.job.schema.job import Job
from headrace.rpc.server import RpcServer, Service
from headrace.run_folder import RunFolder
from services.trainer import loop as training
from services.trainer.breaker import Breaker
from services.trainer.checkpoint.checkpoint import checkpoint_folder
from services.trainer.control.publication import Publisher
from services.trainer.control.rank import Built, build, meet, required
from services.trainer.control.rank_group import RankGroup
from services.trainer.control.ranks import TrainerRanks
from services.trainer.data.fetch import Fetch
from services.trainer.ledger import StreamLedger
from services.trainer.megatron.parallel import FILES_TIMEOUT
from services.trainer.schedule import JobSchedule
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import Evaluator
from services.trainer.serving.export_folder import ExportFolders
from services.trainer.serving.report import Report
from services.trainer.serving.servicer import TrainerServicer
from services.trainer.serving.trackers import trackers


@dataclass(frozen=True, slots=True)
class Serving:
    """Where rank 0 listens. Addresses are `host:port`."""

    address: str
    metrics_address: str | None
    insecure: bool


async def lead(
    job: Job, run_dir: Path, serving: Serving, buffer: Buffer, fetch: Fetch, compute: ThreadPoolExecutor
) -> None:
    """Until the run is finished or left; raises what ended it otherwise."""
    rollout = RolloutClient(required(job.services.rollout_address, "rollout_address"))
    schedule = JobSchedule(job)
    report = Report(run_dir, trackers(job, run_dir))
    console = _console(job, report, rollout, schedule)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, console.leave)
    server = _server(serving, TrainerServicer(console, report, _exports(job, run_dir)))
    await server.start(ready=False)

    async def work() -> None:
        built = await asyncio.get_running_loop().run_in_executor(compute, build, job, run_dir, fetch, met)
        group = RankGroup(met.channel, built.worker.execute, compute)
        publisher = _publisher(job, group, built, rollout)
        ranks = TrainerRanks(job, group, publisher, console, run_dir, built.checkpoints, built.restored_step)
        report.resume(built.restored_step)
        console.open(ranks, built.layout.world_size, built.restored_step)
        await server.set_ready()
        ledger = StreamLedger(buffer, fetch.stream, console, Breaker.of(job))
        await training.train(ledger, ranks, console, schedule)
        await group.leave(deadline_seconds=FILES_TIMEOUT.total_seconds())

    try:
        met = await meet(job, compute)
        await met.channel.guard(work())
        await met.channel.close()
        if console.verdict:
            raise NothingToLearn(console.verdict)
        console.finished()
    except BaseException as error:
        console.finished(str(error) or type(error).__name__)
        raise
    finally:
        await server.stop()
        await rollout.close()


def _console(job: Job, report: Report, rollout: RolloutClient, schedule: JobSchedule) -> TrainerConsole:
    assert job.rollout.rollout_batch_size is not None  # the rules derived it
    return TrainerConsole(
        report,
        Evaluator(job, rollout, schedule),
        run=job.run.run_name,
        num_steps=schedule.num_steps,
        groups_per_step=job.rollout.rollout_batch_size,
    )


def _exports(job: Job, run_dir: Path) -> ExportFolders:
    run = RunFolder(run_dir)
    return ExportFolders(
        job.checkpoint.export_root or run_dir, [checkpoint_folder(job, run_dir), run.ledger, run.logs, run.samples]
    )


def _server(serving: Serving, desk: TrainerServicer) -> RpcServer:
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    return RpcServer(
        "trainer",
        serving.address,
        [Service(desk, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, name)],
        metrics_address=serving.metrics_address,
        insecure=serving.insecure,
    )


def _publisher(job: Job, group: RankGroup, built: Built, rollout: RolloutClient) -> Publisher:
    return Publisher(group, rollout, job.publish, backend="nccl" if built.layout.device.type == "cuda" else "gloo")
