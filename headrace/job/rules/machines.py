"""Rules of machines: services' addresses, several trainer machines, shared GPUs, and the plan of a job's devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.devices import DevicePlan, Host, Wanted, machine_of, plan_devices, this_machine
from headrace.errors import ConfigError, Unavailable
from headrace.job.engine_shape import parts_of
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.limits import LAST_PORT, MAX_COUNTER, shown, whole_number
from headrace.rpc.net import Address, is_ours

_EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104  # refused
_DEFAULT_PORT = 29500  # torchrun's


def addresses_of(address: str | None) -> Sequence[Address]:
    """Returns the addresses of a service that is started elsewhere, else none. Raises ConfigError for a bad one."""
    return [Address.parse(each) for each in address.split(",")] if address else []


def check_services(job: Job) -> None:
    """Raises ConfigError when addresses and numbers of shards or rollout services contradict each other."""
    services, buffer = job.services, job.buffer
    addresses_of(services.rollout_address)
    for option, address, (of_count, count), (of_index, index) in (
        (
            "buffer_address",
            services.buffer_address,
            ("buffer_shards", buffer.buffer_shards),
            ("buffer_shard", buffer.buffer_shard),
        ),
        (
            "rollout_address",
            services.rollout_address,
            ("rollout_services", services.rollout_services),
            ("rollout_service", services.rollout_service),
        ),
    ):
        places = address.split(",") if address else []
        if len(set(places)) < len(places):
            raise ConfigError(f"{option} {address} has an address twice: give each {of_index} its own")
        if places and count not in (1, len(places)):
            raise ConfigError(
                f"{of_count} {count} contradicts {option}, which names {len(places)}: leave "
                f"--{of_count.replace('_', '-')} out where they are started elsewhere, or leave the address out to "
                "have them started here"
            )
        if places and index is not None and index >= len(places):
            raise ConfigError(
                f"{of_index} {index} is not an index of the {len(places)} addresses of {option}, which are counted "
                "from 0"
            )
    port = job.rollout.openai_port
    if port is not None and port + services.num_rollout_services - 1 > LAST_PORT:
        raise ConfigError(
            f"openai_port {port}: rollout service k of {services.num_rollout_services} listens k ports above it, and "
            f"there is none above {LAST_PORT}: choose a lower one"
        )


def check_metrics_port(job: Job, scope: Scope) -> None:
    """Raises ConfigError where several processes, started here, would show their metrics at one port."""
    port = job.services.metrics_port
    if port is None or _starts_one(job, scope):
        return
    raise ConfigError(
        f"metrics_port {port} is one process's, and several are started here ({', '.join(scope.services)}): start each "
        "by `headrace up SERVICE`, of shards and rollout services by its number, or leave --metrics-port out"
    )


def _starts_one(job: Job, scope: Scope) -> bool:
    if len(scope.services) > 1:
        return False
    shards = "buffer" in scope.services and job.buffer.buffer_shard is None and job.buffer.buffer_shards > 1
    rollouts = "rollout" in scope.services and job.services.rollout_service is None
    return not shards and not (rollouts and job.services.num_rollout_services > 1)


def check_service_host(job: Job, scope: Scope) -> None:
    """Raises ConfigError for a host at which services started here cannot listen, or not without certificates."""
    services = job.services
    if services.service_host is None:
        return
    host = Address(services.own_host, 0)
    if host.host in _EVERY_INTERFACE:
        raise ConfigError(
            f"service_host {host.host} means every interface, and is no address that others can call: name the one at "
            "which other machines reach this one"
        )
    if not (host.is_loopback or services.tls_dir or services.insecure):
        raise ConfigError(
            f"service_host {host.host} is an address that other machines reach: pass --tls-dir with the folder that "
            "`headrace certs` makes, or --insecure on a network that nobody else is in"
        )
    try:
        ours = is_ours(host.host)
    except Unavailable:
        ours = False
    if not ours:
        scope.missing(f"service_host {host.host} is no address of this machine: name one that `ip address` shows")


def check_transport(job: Job) -> None:
    """Raises ConfigError for a transport of weights that does not lead from the trainer to the engines."""
    publish = job.publish
    transport = publish.update_weight_transport
    if publish.is_broadcast:
        return
    if publish.update_weight_rollback == "host":
        raise ConfigError(
            f"update_weight_rollback host keeps a copy in memory of what lies in the folder of update_weight_transport "
            f"{transport}, from which engines load it again: leave --update-weight-rollback out"
        )
    address = job.services.rollout_address
    is_here = all(each.is_loopback for each in addresses_of(address))
    spread = job.placement.rollout_placement != "local"
    if is_here and not spread and job.placement.actor_num_nodes == 1:
        return
    where = f"rollout at {address}" if not is_here else f"{job.placement.actor_num_nodes} machines"
    where = f"engines that {job.placement.rollout_placement.capitalize()} places" if spread else where
    if transport == "ipc":
        raise ConfigError(
            f"update_weight_transport ipc with {where}: trainer and engines share no memory. Use "
            "--update-weight-transport collective or disk"
        )
    if publish.update_weight_disk_path is None:
        raise ConfigError(
            f"update_weight_transport {transport} with {where}: the run's folder may be this machine's alone. Name a "
            "folder that all machines see at the same path with --update-weight-disk-path"
        )


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
            "all ranks, with --placement slurm or --placement ray"
        )
    rank = _number(environment, "NODE_RANK", 0) if placement.node_rank is None else placement.node_rank
    if rank >= placement.actor_num_nodes:
        raise ConfigError(
            f"node_rank {rank} is none of {placement.actor_num_nodes} machines, which are counted from 0: correct it "
            "(--node-rank or NODE_RANK), or --actor-num-nodes"
        )
    port = placement.master_port or _number(environment, "MASTER_PORT", _DEFAULT_PORT)
    if not 0 < port <= LAST_PORT:
        raise ConfigError(f"MASTER_PORT {port} is not a port: set a number from 1 to {LAST_PORT}")
    return Meeting(rank, Address(host.strip("[]"), port))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if (number := whole_number(text, MAX_COUNTER)) is None:
        raise ConfigError(f"{name} {shown(text)} in the environment is no number: correct it, or unset it")
    return number


def check_nodes(job: Job) -> None:
    """Raises ConfigError for an option without effect, and where ranks on other machines do not reach a service."""
    placement = job.placement
    given = [name for name in ("node_rank", "master_addr", "master_port") if getattr(placement, name) is not None]
    if given and not _each_starts_its_own(placement):
        raise ConfigError(
            f"{given[0]} has no effect with actor_num_nodes {placement.actor_num_nodes} and placement "
            f"{placement.placement}: it is for several machines that each start their own ranks. Leave it out"
        )
    started_here = None if job.services.service_host is None else str(Address(job.services.own_host, 0))
    for name in ("buffer", "rollout") if placement.actor_num_nodes > 1 else ():
        address = getattr(job.services, f"{name}_address") or started_here
        if address is None or any(each.is_loopback for each in addresses_of(address)):
            where = "is started on this machine's loopback" if address is None else f"is at {address}"
            raise ConfigError(
                f"actor_num_nodes {placement.actor_num_nodes}: ranks on other machines cannot reach {name}, which "
                f"{where}: start it at an address that they can reach and pass --{name}-address, or have it started "
                "there with --service-host"
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
            "reach"
        )
    at = job.services.trainer_address
    if at is None or Address.parse(at).is_loopback:
        raise ConfigError(
            f"trainer_address {at}: the other machines see there whether machine 0 serves: pass --trainer-address "
            f"{Address(meeting.address.host, 7004)}, or another port of it, on each of them"
        )
    if meeting.node_rank and len(scope.services) > 1:
        raise ConfigError(
            f"node_rank {meeting.node_rank}: only machine 0 of the trainer may start {', '.join(scope.services)}: use "
            "`headrace up trainer` here"
        )


def check_colocation(job: Job) -> None:
    """Raises ConfigError for a job whose trainer and engines cannot take turns, or are not on the same devices."""
    if not job.placement.colocate:
        return
    placement, publish = job.placement, job.publish
    if (job.buffer.max_staleness or publish.update_weights_interval > 1) and not job.debug.debug_rollout_only:
        raise ConfigError(
            f"colocate cannot be combined with asynchronous training (max_staleness {job.buffer.max_staleness}, "
            f"update_weights_interval {publish.update_weights_interval}): trainer and engines take turns on the same "
            "GPUs. Leave --colocate out, or set both back to 0 and 1"
        )
    if placement.rollout_num_gpus != placement.actor_num_gpus_per_node:
        raise ConfigError(
            f"colocate with rollout_num_gpus {placement.rollout_num_gpus} and {placement.actor_num_gpus_per_node} of "
            "the trainer on a machine (actor_num_gpus_per_node): a machine's engines are on its ranks' GPUs. Leave "
            "--rollout-num-gpus out"
        )
    several = placement.actor_num_nodes > 1
    for what, instead in _not_on_each_machine(job) if several else _elsewhere(job):
        shared = "the GPUs of each machine" if several else "the GPUs and the memory of one machine"
        raise ConfigError(
            f"colocate with {what}: trainer and engines share {shared}. {instead}, or leave --colocate out"
        )
    if publish.update_weight_transport == "collective":
        raise ConfigError(
            "update_weight_transport collective with colocate: trainer and engines are not on their GPUs at the same "
            "time. Leave it out, which is ipc, or choose disk"
        )
    if publish.update_weight_transport == "adapter":
        raise ConfigError(
            "update_weight_transport adapter with colocate: engines give up their memory, and with it the weights that "
            "adapters are for. Leave it out, which sends merged weights"
        )


def _not_on_each_machine(job: Job) -> Iterator[tuple[str, str]]:
    """Checks the same on several machines; a rule of `nodes` sees that other machines reach the addresses."""
    placement, services = job.placement, job.services
    yield from _not_started_by_a_service(job)
    hosts = {each.host for each in addresses_of(services.rollout_address)}
    if len(hosts) != placement.actor_num_nodes or services.num_rollout_services != len(hosts):
        where = f"rollout at {services.rollout_address}" if hosts else "rollout services that have no address"
        yield (
            f"actor_num_nodes {placement.actor_num_nodes} and {where}",
            "Start `headrace up rollout --rollout-service K` on machine K and name one address of each machine: "
            "--rollout-address HOST-0:7002,HOST-1:7002",
        )
    if job.publish.update_weight_transport == "ipc":
        yield (
            f"update_weight_transport ipc and actor_num_nodes {placement.actor_num_nodes}",
            "Shared memory is one machine's: use --update-weight-transport disk with an --update-weight-disk-path that "
            "all machines see",
        )


def _elsewhere(job: Job) -> Iterator[tuple[str, str]]:
    """What contradicts colocation, and what to do instead."""
    services = job.services
    yield from _not_started_by_a_service(job)
    if services.num_rollout_services > 1:
        yield f"{services.num_rollout_services} rollout services", "Use one"
    elif not all(each.is_loopback for each in addresses_of(services.rollout_address)):
        where = f"rollout at {services.rollout_address}"
        yield where, "Start the rollout service at a loopback address"


def _not_started_by_a_service(job: Job) -> Iterator[tuple[str, str]]:
    placement = job.placement
    if placement.rollout_external_engine_addrs:
        yield "engines that are started elsewhere", "Let headrace start the engines"
    if placement.rollout_placement != "local":
        where = f"rollout_placement {placement.rollout_placement}"
        yield where, "Let the rollout service start the engines"


def device_plan(job: Job, scope: Scope, *, leaves_the_trainers: bool = True) -> DevicePlan | None:
    """The trainer's GPUs on this machine, and each engine's. None where none is known.

    The trainer's other machines are like this one. Engines that start without it leave it what it will need, unless
    what there is was chosen for them. Raises ConfigError when there are too few.
    """
    machine = _machine(job, scope)
    engines = _engine_parts(job, scope)
    trains = "trainer" in scope.services if not leaves_the_trainers else _trains_here(job, scope)
    if machine is None or not (trains or engines):
        return None
    ranks = job.placement.actor_num_gpus_per_node if trains else 0
    plan = plan_devices([machine], Wanted(int(trains), ranks, engines, job.placement.colocate))
    return plan if "trainer" in scope.services else replace(plan, trainer=[])


def cluster_plan(job: Job) -> DevicePlan | None:
    """Where trainer and engines lie on the fewest machines of a cluster that have room; None for engines started here.

    None, too, where nobody knows how many GPUs each machine has. Raises ConfigError for ranks that fit on none.
    """
    placement = job.placement
    if placement.rollout_placement == "local" or placement.num_gpus_per_node is None or not job.asks_engines:
        return None
    most = placement.actor_num_nodes + sum(map(len, parts_of(job))) * job.services.rollout_services
    return plan_on([machine_of(f"machine {number}", placement.num_gpus_per_node) for number in range(most)], job)


def plan_on(machines: Sequence[Host], job: Job) -> DevicePlan:
    """The trainer's ranks have the first GPUs of the first machines. Raises ConfigError when there are too few."""
    placement, parts = job.placement, [*parts_of(job)] * job.services.rollout_services
    return plan_devices(machines, Wanted(placement.actor_num_nodes, placement.actor_num_gpus_per_node, parts))


def _machine(job: Job, scope: Scope) -> Host | None:
    limit = job.placement.num_gpus_per_node
    if scope.elsewhere is not None:
        return None if limit is None else machine_of("a machine", limit)
    machine = this_machine()
    if limit is None or not machine.devices:
        return machine if machine.devices else None
    if limit > len(machine.devices):
        raise ConfigError(f"num_gpus_per_node {limit} is more than there is: {machine}. Lower it, or leave it out")
    return replace(machine, devices=machine.nearest_first()[:limit])


def _trains_here(job: Job, scope: Scope) -> bool:
    """The trainer is here if it starts here, or engines do that share its GPUs or that only this machine reaches."""
    if job.debug.debug_rollout_only:
        return False
    if "trainer" in scope.services or (job.placement.colocate and "rollout" in scope.services):
        return True
    addresses = (job.services.rollout_address or str(Address(job.services.own_host, 0))).split(",")
    return "rollout" in scope.services and all(Address.parse(address).is_loopback for address in addresses)


def _engine_parts(job: Job, scope: Scope) -> Sequence[Sequence[int]]:
    """GPUs of each engine that is started here, by its parts; those of one rollout service after the one before's."""
    placement = job.placement
    elsewhere = placement.rollout_external_engine_addrs or placement.rollout_placement != "local"
    if "rollout" not in scope.services or elsewhere or job.debug.trains_alone or not job.asks_engines:
        return ()
    return [*parts_of(job)] * job.services.rollout_services
