"""How one rank starts: it joins the others, watches over them from then on, and builds its share of the model.

The event loop is the main thread's; whatever may wait for other ranks happens in the compute thread.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.rpc.log import log
from headrace.rpc.net import Address
from headrace.run_folder import RunFolder
from headrace.sample_log import SampleLog
from services.trainer.checkpoint.checkpoint import Checkpoints, checkpoint_folder
from services.trainer.control.bootstrap import open_channel
from services.trainer.control.channel import Channel
from services.trainer.control.sender import WeightSender
from services.trainer.control.worker import Worker
from services.trainer.data.fetch import Fetch
from services.trainer.data.sample_log import TrainedSamples
from services.trainer.megatron.parallel import Layout
from services.trainer.model.build import join_ranks, policy_of
from services.trainer.model.policy import Policy


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank has once it has met the others."""

    layout: Layout
    channel: Channel


@dataclass(frozen=True, slots=True)
class Built:
    """What the compute thread builds on every rank."""

    layout: Layout
    worker: Worker
    checkpoints: Checkpoints
    restored_step: int


async def meet(job: Job, compute: ThreadPoolExecutor) -> Met:
    """Joins the other ranks and watches over them from here on."""
    loop = asyncio.get_running_loop()
    log.info("joining")
    layout = await loop.run_in_executor(compute, join_ranks, job)
    channel = await open_channel(layout.rank, layout.world_size, layout.device, compute)
    log.info("met", rank=layout.rank, world_size=layout.world_size)
    return Met(layout, channel)


def build(job: Job, run_dir: Path, fetch: Fetch, met: Met) -> Built:
    """In the compute thread of every rank at once: the policy, its latest checkpoint."""
    layout = met.layout
    policy = policy_of(job, layout)
    checkpoints = Checkpoints(job, run_dir, layout)
    log.info("restoring", folder=str(checkpoint_folder(job, run_dir)))
    restored_step = checkpoints.restore_latest(policy.saved)
    sender = sender_of(job, policy, layout, met.channel.is_aborted)
    gc.freeze()  # libraries and the model stay: a collection that looks at them costs a step 0.1 s
    log.info("built", restored_step=restored_step)
    worker = Worker(policy, sender, fetch, checkpoints, _trained_samples(job, run_dir, layout))
    return Built(layout, worker, checkpoints, restored_step)


def sender_of(job: Job, policy: Policy, layout: Layout, is_aborted: Callable[[str], bool]) -> WeightSender:
    """This rank's part in publications, as the job's flags want it."""
    return WeightSender(
        policy,
        layout,
        is_aborted,
        host=_sender_host(job),
        bucket_bytes=job.publish.update_weight_buffer_size,
        timeout_seconds=job.publish.update_weight_timeout_seconds,
    )


def _trained_samples(job: Job, run_dir: Path, layout: Layout) -> TrainedSamples | None:
    """One rank writes for those that have the same samples."""
    if not (layout.speaks and layout.is_last_stage and job.tracking.sample_log_bytes):
        return None
    return TrainedSamples(SampleLog(RunFolder(run_dir).samples), layout.data_rank, job.tracking.sample_log_bytes)


def _sender_host(job: Job) -> str:
    """Where engines find this rank: loopback when the rollout service is on this machine, else the machine's name."""
    rollout = Address.parse(required(job.services.rollout_address, "rollout_address"))
    return "127.0.0.1" if rollout.is_loopback else socket.gethostbyname(socket.gethostname())


def required(address: str | None, leaf: str) -> str:
    if address is None:
        raise ConfigError(
            f"services.{leaf} is not set: start the service and pass --{leaf.replace('_', '-')} host:port"
        )
    return address
