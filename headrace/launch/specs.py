"""From a job to the processes of its run: addresses, command lines, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from headrace.config.job import Job
from headrace.config.rules import ranks
from headrace.errors import ConfigError
from headrace.launch.process import ServiceSpec
from headrace.launch.run_folder import RunFolder
from headrace.rpc.net import free_port

SERVICES = ("buffer", "reward", "rollout", "trainer")
"""In the order of starting; they are ended the other way round."""


def addressed(job: Job) -> Job:
    """The job with an address for every service: those that had none get a free port of this machine."""
    given = job.services.model_dump()
    addresses = {leaf: value or f"127.0.0.1:{free_port()}" for leaf, value in given.items()}
    return job.model_copy(update={"services": job.services.model_copy(update=addresses)})


def address_of(job: Job, service: str) -> str:
    """The address that `addressed` gave or kept."""
    address: str | None = job.services.model_dump()[f"{service}_address"]
    if address is None:
        raise ConfigError(f"{service}_address is not set: pass --{service}-address host:port")
    return address


def started_here(job: Job) -> list[str]:
    """Services that have no address yet, and the trainer."""
    given = job.services.model_dump()
    return [name for name in SERVICES if name == "trainer" or given[f"{name}_address"] is None]


def spec(job: Job, service: str, folder: RunFolder) -> ServiceSpec:
    """How to start one service of an addressed job."""
    address, metrics_address = address_of(job, service), f"127.0.0.1:{free_port()}"
    arguments = ["--config", str(folder.job_file), "--address", address, "--metrics-address", metrics_address]
    extra = {
        "buffer": ["--data-dir", str(folder.ledger)],
        "reward": [],
        "rollout": ["--log-dir", str(folder.logs)],
        "trainer": ["--run-dir", str(folder.path)],
    }
    return ServiceSpec(
        name=service,
        command=[*_program(job, service), *arguments, *extra[service]],
        address=address,
        metrics_address=metrics_address,
        log_file=folder.logs / f"{service}.log",
        environment=_environment(job, service),
    )


def _program(job: Job, service: str) -> list[str]:
    if service != "trainer":
        return [sys.executable, "-m", f"services.{service}"]
    if job.placement.actor_num_nodes > 1:
        raise ConfigError(
            f"actor_num_nodes {job.placement.actor_num_nodes}: headrace starts the trainer on one machine only. Start "
            "the other services with headrace up, and torchrun … -m services.trainer on each of the trainer's machines",
            field="actor_num_nodes",
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    return [*torchrun, "--nproc-per-node", str(ranks(job)), "-m", "services.trainer"]


def _environment(job: Job, service: str) -> Mapping[str, str]:
    """Ranks share the cores; everything else wants one thread. What the caller's environment says wins."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // ranks(job)) if service == "trainer" else 1
    wanted = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}
