"""Derives the processes of a run from its job: addresses, command lines, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError, Unavailable
from headrace.job.rules.scope import services_here
from headrace.job.schema.job import Job
from headrace.launch.process import ServiceSpec
from headrace.launch.ranks.placement import LOSING_EXIT_CODES, starter
from headrace.process.openmp import openmp, threads_of_each
from headrace.rpc.net import Address, free_port, require_free
from headrace.run_folder import BUFFER, RunFolder, ServiceEntry, service_of, shard_name, shard_of

SERVICES = ("buffer", "reward", "rollout", "trainer")
"""In the order of starting; they are ended the other way round."""

_NEEDED: Mapping[str, Sequence[str]] = {
    "buffer": (),
    "reward": (),
    "rollout": ("buffer", "reward"),
    "trainer": ("buffer", "rollout"),
}

_LOADS: Mapping[str, str] = {"rollout": "SGLang", "trainer": "torch and Megatron"}


def without_address(job: Job) -> list[str]:
    """The services that `headrace train` starts: those without an address in the job, and the trainer."""
    return services_here(job)


def addressed(job: Job, services: Sequence[str], folder: RunFolder) -> Job:
    """The job with the addresses of its services: given ones, those that run already, and free ports for `services`.

    A service that was started in this folder before gets its address again, so that the others still find it.
    """
    found = folder.running_addresses()
    before = folder.services() if folder.services_file.is_file() else {}
    for name in services:
        entries = [before.get(each) for each in processes(job, name)]
        found[name] = ",".join(_earlier(entry) or f"127.0.0.1:{free_port()}" for entry in entries)
    found |= {name: address for name in SERVICES if (address := address_in(job, name))}
    addresses = {f"{name}_address": address for name, address in found.items()}
    return job.model_copy(update={"services": job.services.model_copy(update=addresses)})


def processes(job: Job, service: str) -> Sequence[str]:
    """The names of the processes that a service is: one, or one for each shard of the buffer."""
    if service != BUFFER or job.buffer.buffer_shards == 1 or job.buffer.buffer_shard is not None:
        return [service]
    return [shard_name(shard) for shard in range(job.buffer.buffer_shards)]


def _earlier(entry: ServiceEntry | None) -> str | None:
    """The service's earlier address, if it was started here and its port is still free."""
    if entry is None or entry.pid is None:
        return None
    try:
        require_free(Address.parse(entry.address))
    except Unavailable:
        return None
    return entry.address


def address_in(job: Job, service: str) -> str | None:
    """The job's address of the service, or of the shard that is started here. None when the job has none."""
    if service == "buffer" and job.buffer.buffer_shard is not None:
        return job.buffer.buffer_addresses[job.buffer.buffer_shard]
    address: str | None = job.services.model_dump()[f"{service}_address"]
    return address


def address_of(job: Job, service: str) -> str:
    """The job's address of the service. Raises ConfigError when it has none."""
    address = address_in(job, service)
    if address is None:
        raise ConfigError(f"{service}_address is not set: start the {service} service and pass --{service}-address")
    return address


def specs(job: Job, service: str, folder: RunFolder) -> list[ServiceSpec]:
    """Describes how to start the processes of one service of an addressed job."""
    return [spec(job, process, folder) for process in processes(job, service)]


def spec(job: Job, process: str, folder: RunFolder) -> ServiceSpec:
    """Describes how to start one of `processes` of an addressed job."""
    service, shard = service_of(process), shard_of(process)
    for needed in () if job.debug.trains_alone else _NEEDED[service]:
        address_of(job, needed)
    address, metrics_address = address_of(job, service), f"127.0.0.1:{free_port()}"
    if shard is not None:
        address = address.split(",")[shard]
    arguments = ["--config", str(folder.job_file), "--address", address, "--metrics-address", metrics_address]
    arguments += ["--insecure"] if job.services.insecure else []
    extra = {
        "buffer": ["--data-dir", str(folder.ledger_of(shard)), *([] if shard is None else ["--shard", str(shard)])],
        "reward": [],
        "rollout": ["--log-dir", str(folder.logs), "--samples-dir", str(folder.samples)],
        "trainer": ["--run-dir", str(folder.path)],
    }
    return ServiceSpec(
        name=process,
        command=[*_program(job, service, folder), *arguments, *extra[service]],
        address=address,
        metrics_address=metrics_address,
        log_file=folder.logs / f"{process}.log",
        environment=_environment(job, service),
        loads=_LOADS.get(service),
        ending=folder.ending if service == "trainer" else None,
        keeps_exit_code=service != "trainer" or job.placement.placement not in LOSING_EXIT_CODES,
        start_seconds=job.services.start_timeout_seconds,
        **_restarts(job, service),
    )


def _restarts(job: Job, service: str) -> dict[str, Any]:
    """A trainer restarts only when the job says so, because the cause of its death may come back with every restart."""
    if service != "trainer":
        return {}
    if job.placement.use_fault_tolerance:
        return {"max_restarts": job.placement.max_trainer_restarts}
    return {
        "no_restart": "--use-fault-tolerance would restart it from its last checkpoint; the same command does so, too"
    }


def _program(job: Job, service: str, folder: RunFolder) -> list[str]:
    program = [sys.executable, "-m", f"services.{service}"]
    if service != "trainer" or job.debug.debug_rollout_only:
        return program
    return [*starter(job.placement, folder), *program]


def _environment(job: Job, service: str) -> Mapping[str, str]:
    """Ranks share the cores; other services need one. The rollout service decides about its engines."""
    unbuffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
    if service == "rollout":
        return unbuffered
    return {**unbuffered, **openmp(threads_of_each(job.placement.num_ranks) if service == "trainer" else 1)}
