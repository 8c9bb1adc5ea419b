"""Derives the processes of a run from its job: addresses, command lines, environments, and which GPUs are theirs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.devices import ORDER, RANK_DEVICES, DeviceShare
from headrace.errors import ConfigError, Unavailable
from headrace.hooks.slime_names import slime_environment
from headrace.job.rules.machines import device_plan, meeting_of
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.launch.process import ServiceSpec
from headrace.process.computing import openmp, threads_of_each
from headrace.rpc.net import Address, free_port, own_place, require_free
from headrace.rpc.proxies import direct_to
from headrace.run_folder import BUFFER, ROLLOUT, RunFolder, ServiceEntry, number_of, process_name, service_of

SERVICES = ("buffer", "reward", "rollout", "trainer")
"""The services in the order of starting; they are ended in the reverse order."""

_NEEDED: Mapping[str, Sequence[str]] = {
    "buffer": (),
    "reward": (),
    "rollout": ("buffer", "reward"),
    "trainer": ("buffer", "rollout"),
}

_LOADS: Mapping[str, str] = {"rollout": "SGLang", "trainer": "torch and Megatron"}


def addressed(job: Job, services: Sequence[str], folder: RunFolder) -> Job:
    """The job with the addresses of its services: given ones, those that run already, and free ports for `services`.

    A service that was started in this folder before gets its address again, so that the others still find it.
    """
    found, host, given = folder.running_addresses(), job.services.own_host, job.services.model_dump()
    before = folder.services_before()
    for name in services:
        entries = [before.get(each) for each in processes(job, name)]
        found[name] = ",".join(_earlier(entry, host) or str(Address(host, free_port(host))) for entry in entries)
    # All addresses of a service, also where one of several is started: its share depends on their number.
    found |= {name: address for name in SERVICES if (address := given[f"{name}_address"])}
    addresses = {f"{name}_address": address for name, address in found.items()}
    return job.model_copy(update={"services": job.services.model_copy(update=addresses)})


def processes(job: Job, service: str) -> Sequence[str]:
    """The names of the processes that a service is: one, or one for each shard of the buffer or rollout service."""
    counts = {BUFFER: job.buffer.buffer_shards, ROLLOUT: job.services.rollout_services}
    if counts.get(service, 1) == 1 or _chosen(job, service) is not None:
        return [service]
    return [process_name(service, number) for number in range(counts[service])]


def _chosen(job: Job, service: str) -> int | None:
    """The index, among the addresses of the service, of the one that the job says is started here."""
    return {BUFFER: job.buffer.buffer_shard, ROLLOUT: job.services.rollout_service}.get(service)


def _earlier(entry: ServiceEntry | None, host: str) -> str | None:
    """The service's earlier address, if it was started on this host and its port is still free."""
    if entry is None or entry.pid is None or Address.parse(entry.address).host != host:
        return None
    try:
        require_free(Address.parse(entry.address))
    except Unavailable:
        return None
    return entry.address


def address_in(job: Job, service: str) -> str | None:
    """The job's address of the service, or of the one of several that is started here. None when the job has none."""
    address: str | None = job.services.model_dump()[f"{service}_address"]
    number = _chosen(job, service)
    if address is None or number is None:
        return address
    return address.split(",")[number]


def address_of(job: Job, service: str) -> str:
    """The job's address of the service. Raises ConfigError when it has none."""
    address = address_in(job, service)
    if address is None:
        raise ConfigError(f"{service}_address is not set: start the {service} service and pass --{service}-address")
    return address


def folder_here(job: Job, services: Sequence[str]) -> RunFolder:
    """The folder of what this machine starts: the run's, and one in it for another machine of the trainer."""
    folder = RunFolder.of(job)
    rank = _node_rank(job) if "trainer" in services else 0
    return RunFolder(folder.path / f"node-{rank}") if rank else folder


def _node_rank(job: Job) -> int:
    meeting = meeting_of(job.placement)
    return 0 if meeting is None else meeting.node_rank


def specs(
    job: Job,
    service: str,
    folder: RunFolder,
    gpus: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    config: Path | None = None,
) -> list[ServiceSpec]:
    """Describes how to start the processes of one service of an addressed job.

    `gpus`: variables that name the GPUs of a process. `config`: the job's file, if not the launcher's.
    """
    return [spec(job, process, folder, gpus.get(process, {}), config) for process in processes(job, service)]


def spec(
    job: Job,
    process: str,
    folder: RunFolder,
    gpus: Mapping[str, str] = MappingProxyType({}),
    config: Path | None = None,
) -> ServiceSpec:
    """Describes how to start one of `processes` of an addressed job."""
    service, number = service_of(process), number_of(process)
    for needed in () if job.debug.trains_alone else _NEEDED[service]:
        if needed != "reward" or job.scores:
            address_of(job, needed)
    address = address_of(job, service)
    if number is not None:
        address = address.split(",")[number]
    listens_at = _listens_at(job, address)
    metrics_address = _metrics_at(job, listens_at)
    arguments = [
        "--config",
        str(config or folder.config_of(service)),
        "--address",
        str(listens_at),
        "--metrics-address",
        metrics_address,
    ]
    arguments += ["--insecure"] if job.services.insecure else []
    arguments += [*_path("--tls-dir", job.services.tls_dir), *_path("--tokens-file", job.services.tokens_file)]
    extra = {
        "buffer": ["--data-dir", str(folder.ledger_of(number)), *_flag("--shard", number)],
        "reward": [],
        "rollout": [
            *("--log-dir", str(folder.logs_of(number)), "--samples-dir", str(folder.samples)),
            *_flag("--number", job.services.rollout_service if number is None else number),
        ],
        "trainer": ["--run-dir", str(job.run.folder)],
    }
    return ServiceSpec(
        name=process,
        command=[*_program(job, service, folder), *arguments, *extra[service]],
        address=address,
        bound=listens_at,
        metrics_address=metrics_address,
        log_file=folder.logs / f"{process}.log",
        environment={**_environment(job, service), **gpus},
        loads=_LOADS.get(service) if service != ROLLOUT or job.asks_engines else None,
        exit_status=folder.exit_status if service == "trainer" else None,
        serves=service != "trainer" or not _node_rank(job),
        restart_request=folder.restart_request(process),
        held=_held(job, number) if service == ROLLOUT else None,
        keeps_exit_code=service != "trainer" or job.placement.placement != "slurm",
        start_seconds=job.services.start_timeout_seconds,
        **_restarts(job, service),
    )


def _listens_at(job: Job, address: str) -> Address:
    """The place on this machine, of a server and its standby."""
    host = job.services.listen_host
    if host is None:
        return own_place(address)
    return Address(host.strip("[]"), Address.parse(address.partition("|")[0]).port)


def _held(job: Job, number: int | None) -> Address | None:
    """The port of OpenAI's protocol, if the job names one; each of several services has its number above it."""
    if (port := job.rollout.openai_port) is None:
        return None
    return Address(job.rollout.openai_host, port + (number or job.services.rollout_service or 0))


def _metrics_at(job: Job, listens_at: Address) -> str:
    port = job.services.metrics_port
    return f"127.0.0.1:{free_port()}" if port is None else str(Address(listens_at.host, port))


def _flag(name: str, number: int | None) -> list[str]:
    return [] if number is None else [name, str(number)]


def _path(name: str, path: Path | None) -> list[str]:
    return [] if path is None else [name, str(path.absolute())]


MAX_TRAINER_RESTARTS = 5
"""Restarts of the trainer within ten minutes before the run fails."""


def _restarts(job: Job, service: str) -> dict[str, Any]:
    """A trainer restarts only when the job says so, because the cause of its death may come back with every restart."""
    if service != "trainer":
        return {}
    if job.placement.use_fault_tolerance:
        return {"max_restarts": MAX_TRAINER_RESTARTS}
    return {
        "no_restart": "--use-fault-tolerance would restart it from its last checkpoint; the same command does so, too"
    }


def _program(job: Job, service: str, folder: RunFolder) -> list[str]:
    program = [*job.services.python_of(service), "-m", f"services.{service}"]
    if service != "trainer" or job.debug.debug_rollout_only:
        return program
    return [*starter(job.placement, folder), *program]


def _environment(job: Job, service: str) -> Mapping[str, str]:
    """Ranks share the cores; other services need one. The rollout service decides about its engines."""
    unbuffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
    threads = {} if service == "rollout" else openmp(threads_of_each(_ranks_here(job)) if service == "trainer" else 1)
    return {
        **unbuffered,
        **threads,
        **slime_environment(job.run.slime_imports),
        **direct_to(*_own_hosts(job)),
    }


def _own_hosts(job: Job) -> set[str]:
    """The hosts of all parts of the run, which no proxy of the environment may stand between."""
    services, placement = job.services, job.placement
    addresses = [address for name in SERVICES for address in (address_in(job, name) or "").replace("|", ",").split(",")]
    addresses += [*(services.rollout_address or "").split(","), *placement.rollout_external_engine_addrs]
    hosts = {Address.parse(address).host for address in addresses if address}
    named = {services.own_host, services.listen_host, job.rollout.openai_host, placement.master_addr}
    return {host for host in hosts | named if host}


def _ranks_here(job: Job) -> int:
    one = job.placement.placement == "local"
    return job.placement.actor_num_gpus_per_node if one else job.placement.num_ranks


def starter(placement: PlacementSection, folder: RunFolder) -> list[str]:
    """The words before `python -m services.trainer …`: the program that starts the ranks, and its machines.

    local  headrace.launch.ranks.local: this machine, or this one's of several that each start their own.
    slurm  headrace.launch.ranks.slurm: the machines of the allocation that this process runs in.
    ray    headrace.launch.ranks.ray: a placement group of the Ray cluster.

    Raises ConfigError when this machine cannot start ranks this way.
    """
    ranks, logs = str(placement.actor_num_gpus_per_node), str(folder.logs)
    program = [sys.executable, "-m", f"headrace.launch.ranks.{placement.placement}"]
    if placement.placement != "local":
        (_require_slurm if placement.placement == "slurm" else _require_ray)()
        return [*program, str(placement.actor_num_nodes), ranks, logs]
    if (meeting := meeting_of(placement)) is not None:
        program += [
            f"--nodes={placement.actor_num_nodes}",
            f"--node-rank={meeting.node_rank}",
            f"--master={meeting.address}",
        ]
    return [*program, ranks, logs]


def _require_slurm() -> None:
    if shutil.which("srun") is None:
        raise ConfigError("placement slurm needs srun, which this machine does not have")
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "placement slurm starts ranks in an allocation, and this process is not in one: see "
            "deploy/slurm/train.sbatch"
        )


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("placement ray needs the package ray: pip install 'headrace[ray]'")


def gpu_environments(job: Job, services: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The variables of each process that gets GPUs here. Empty on a machine without.

    What a person exports (`given`) for one service that is started by itself is for that service alone.
    """
    alone = not {"trainer", "rollout"} <= set(services)
    plan = device_plan(job, Scope(services), leaves_the_trainers="CUDA_VISIBLE_DEVICES" not in given or not alone)
    if plan is None:
        return {}
    found = {}
    if plan.trainer:
        found["trainer"] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(plan.trainer)}
        if not alone:
            found["trainer"][RANK_DEVICES] = _all(plan.trainer)
    each = len(plan.engines) // job.services.rollout_services
    for number, process in enumerate(processes(job, "rollout") if each else ()):
        shares = [share for engine in plan.engines[number * each : (number + 1) * each] for share in engine]
        found[process] = ORDER | {"CUDA_VISIBLE_DEVICES": _all(shares)}
    return found


def _all(shares: Sequence[DeviceShare]) -> str:
    return ",".join(share.visible for share in shares)
