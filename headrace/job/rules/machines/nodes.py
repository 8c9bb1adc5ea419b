"""Rules of a trainer over several machines, and the place where those meet that each start their own ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.job.rules.service_rules import addresses_of
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.limits import LAST_PORT, MAX_COUNTER, shown, whole_number
from headrace.rpc.net import Address

_DEFAULT_PORT = 29500  # torchrun's
_OPTIONS = ("node_rank", "master_addr", "master_port")


@dataclass(frozen=True, slots=True)
class Meeting:
    """This machine's number, and the place where rank 0 waits for the ranks of the others."""

    node_rank: int
    address: Address


def meeting_of(placement: PlacementSection, environment: Mapping[str, str] = os.environ) -> Meeting | None:
    """None where one program starts all ranks. Raises ConfigError for an option that is missing or impossible."""
    if not _each_starts_its_own(placement):
        return None
    host = placement.master_addr or environment.get("MASTER_ADDR")
    if not host:
        raise ConfigError(
            f"actor_num_nodes {placement.actor_num_nodes}: pass --master-addr ADDRESS-OF-MACHINE-0 (or set "
            "MASTER_ADDR) and run `headrace up trainer` on each machine with its --node-rank; or let one program start "
            "all ranks, with --placement slurm or --placement ray",
            field="master_addr",
        )
    rank = _number(environment, "NODE_RANK", 0) if placement.node_rank is None else placement.node_rank
    if rank >= placement.actor_num_nodes:
        raise ConfigError(
            f"node_rank {rank} is none of {placement.actor_num_nodes} machines, which are counted from 0: correct it "
            "(--node-rank or NODE_RANK), or --actor-num-nodes",
            field="node_rank",
        )
    port = placement.master_port or _number(environment, "MASTER_PORT", _DEFAULT_PORT)
    if not 0 < port <= LAST_PORT:
        raise ConfigError(f"MASTER_PORT {port} is no port: set one of 1 to {LAST_PORT}", field="master_port")
    return Meeting(rank, Address(host.strip("[]"), port))


def check_nodes(job: Job) -> None:
    """Raises ConfigError for an option without effect, and where ranks on other machines do not reach a service."""
    _check_unused(job.placement)
    if job.placement.actor_num_nodes > 1:
        _check_reached_by_ranks(job)


def _check_unused(placement: PlacementSection) -> None:
    given = [name for name in _OPTIONS if getattr(placement, name) is not None]
    if given and not _each_starts_its_own(placement):
        raise ConfigError(
            f"{given[0]} has no effect with actor_num_nodes {placement.actor_num_nodes} and placement "
            f"{placement.placement}: it is for several machines that each start their own ranks. Leave it out",
            field=given[0],
        )


def _check_reached_by_ranks(job: Job) -> None:
    started_here = None if job.services.service_host is None else str(Address(job.services.own_host, 0))
    for name, named in (("buffer", job.services.buffer_address), ("rollout", job.services.rollout_address)):
        address = named or started_here
        if address is None or any(each.is_loopback for each in addresses_of(address)):
            where = "is started on this machine's loopback" if address is None else f"is at {address}"
            raise ConfigError(
                f"actor_num_nodes {job.placement.actor_num_nodes}: ranks on other machines cannot reach {name}, which "
                f"{where}: start it at an address that they can reach and pass --{name}-address, or have it started "
                "there with --service-host",
                field=f"{name}_address",
            )


def _each_starts_its_own(placement: PlacementSection) -> bool:
    """True for several machines whose ranks no single program starts."""
    return placement.actor_num_nodes > 1 and placement.placement == "local"


def check_meeting(job: Job, scope: Scope) -> None:
    """Raises ConfigError where machines that each start their own ranks could not find each other."""
    if "trainer" not in scope.services or (meeting := meeting_of(job.placement)) is None:
        return
    if meeting.address.is_loopback:
        raise ConfigError(
            f"master_addr {meeting.address.host} is each machine's own: name an address of machine 0 that the others "
            "reach",
            field="master_addr",
        )
    at = job.services.trainer_address
    if at is None or Address.parse(at).is_loopback:
        raise ConfigError(
            f"trainer_address {at}: the other machines see there whether machine 0 serves: pass --trainer-address "
            f"{Address(meeting.address.host, 7004)}, or another port of it, on each of them",
            field="trainer_address",
        )
    if meeting.node_rank and len(scope.services) > 1:
        raise ConfigError(
            f"node_rank {meeting.node_rank}: only machine 0 of the trainer may start {', '.join(scope.services)}: use "
            "`headrace up trainer` here",
            field="node_rank",
        )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if (number := whole_number(text, MAX_COUNTER)) is None:
        raise ConfigError(f"{name} {shown(text)} in the environment is no number: correct it, or unset it")
    return number
