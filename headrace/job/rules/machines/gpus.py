"""Plans the GPUs of a job's trainer and engines, where GPUs are known: found here, or counted by the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.devices import DevicePlan, Host, Wanted, machine_of, plan_devices, this_machine
from headrace.errors import ConfigError
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.rpc.net import Address


def check_gpus(job: Job, scope: Scope) -> None:
    """Raises ConfigError for more ranks and engines than this machine has GPUs for."""
    device_plan(job, scope)


def device_plan(job: Job, scope: Scope, *, leaves_the_trainers: bool = True) -> DevicePlan | None:
    """The trainer's GPUs on this machine, and each engine's. None where none is known.

    The trainer's other machines are like this one. Engines that start without it leave it what it will need, unless
    what there is was chosen for them. Raises ConfigError when there are too few.
    """
    machine = _machine(job, scope)
    engines = _engine_sizes(job, scope)
    trains = "trainer" in scope.services if not leaves_the_trainers else _trains_here(job, scope)
    if machine is None or not (trains or engines):
        return None
    ranks = job.placement.actor_num_gpus_per_node if trains else 0
    plan = plan_devices([machine], Wanted(int(trains), ranks, engines, job.placement.colocate))
    return plan if "trainer" in scope.services else replace(plan, trainer=[])


def _machine(job: Job, scope: Scope) -> Host | None:
    limit = job.placement.num_gpus_per_node
    if scope.elsewhere is not None:
        return None if limit is None else machine_of("a machine", limit)
    machine = this_machine()
    if limit is None or not machine.devices:
        return machine if machine.devices else None
    if limit > len(machine.devices):
        raise ConfigError(
            f"num_gpus_per_node {limit} is more than there is: {machine}. Lower it, or leave it out",
            field="num_gpus_per_node",
        )
    return replace(machine, devices=machine.nearest_first()[:limit])


def _trains_here(job: Job, scope: Scope) -> bool:
    """The trainer is here if it starts here, or engines do that share its GPUs or that only this machine reaches."""
    if job.debug.debug_rollout_only:
        return False
    if "trainer" in scope.services or (job.placement.colocate and "rollout" in scope.services):
        return True
    addresses = (job.services.rollout_address or str(Address(job.services.own_host, 0))).split(",")
    return "rollout" in scope.services and all(Address.parse(address).is_loopback for address in addresses)


def _engine_sizes(job: Job, scope: Scope) -> Sequence[int]:
    """GPUs of each engine that is started here, those of one rollout service after those of the service before."""
    placement = job.placement
    elsewhere = placement.rollout_external_engine_addrs or placement.rollout_placement == "ray"
    if "rollout" not in scope.services or elsewhere or job.debug.trains_alone or not job.asks_engines:
        return ()
    groups = [group.size for group in placement.engine_groups for _ in range(group.count)]
    of_one = groups or [placement.rollout_num_gpus_per_engine] * placement.num_engines
    return of_one * job.services.rollout_services
