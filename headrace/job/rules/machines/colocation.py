"""Rules of --colocate: trainer and engines take turns on the GPUs of one machine, or of each of several.

Each of several machines has its ranks and a rollout service of its own, at an address that the others reach.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.errors import ConfigError
from headrace.job.rules.service_rules import addresses_of
from headrace.job.schema.job import Job


def check_colocation(job: Job) -> None:
    """Raises ConfigError for a job whose trainer and engines cannot take turns, or are not on the same devices."""
    if not job.placement.colocate:
        return
    _synchronous(job)
    _as_many_gpus(job)
    several = job.placement.actor_num_nodes > 1
    for field, what, instead in _not_on_each_machine(job) if several else _elsewhere(job):
        shared = "the GPUs of each machine" if several else "the GPUs and the memory of one machine"
        raise ConfigError(
            f"colocate with {what}: trainer and engines share {shared}. {instead}, or leave --colocate out", field=field
        )
    if job.publish.update_weight_transport == "collective":
        raise ConfigError(
            "update_weight_transport collective with colocate: trainer and engines are not on their GPUs at the same "
            "time. Leave it out, which is ipc, or choose disk",
            field="update_weight_transport",
        )


def _synchronous(job: Job) -> None:
    if job.debug.debug_rollout_only:
        return
    if job.buffer.max_staleness or job.publish.update_weights_interval > 1:
        raise ConfigError(
            f"colocate cannot be combined with asynchronous training (max_staleness {job.buffer.max_staleness}, "
            f"update_weights_interval {job.publish.update_weights_interval}): trainer and engines take turns on the "
            "same GPUs. Leave --colocate out, or set both back to 0 and 1",
            field="colocate",
        )


def _as_many_gpus(job: Job) -> None:
    placement = job.placement
    if placement.rollout_num_gpus != placement.actor_num_gpus_per_node:
        raise ConfigError(
            f"colocate with rollout_num_gpus {placement.rollout_num_gpus} and {placement.actor_num_gpus_per_node} of "
            "the trainer on a machine (actor_num_gpus_per_node): a machine's engines are on its ranks' GPUs. Leave "
            "--rollout-num-gpus out",
            field="rollout_num_gpus",
        )


def _not_on_each_machine(job: Job) -> Iterator[tuple[str, str, str]]:
    """Checks the same on several machines; a rule of `nodes` sees that other machines reach the addresses."""
    placement, services = job.placement, job.services
    yield from _not_started_by_a_service(job)
    hosts = {each.host for each in addresses_of(services.rollout_address)}
    if len(hosts) != placement.actor_num_nodes or services.num_rollout_services != len(hosts):
        where = f"rollout at {services.rollout_address}" if hosts else "rollout services that have no address"
        yield (
            "rollout_address",
            f"actor_num_nodes {placement.actor_num_nodes} and {where}",
            "Start `headrace up rollout --rollout-service K` on machine K and name one address of each machine: "
            "--rollout-address HOST-0:7002,HOST-1:7002",
        )
    if job.publish.update_weight_transport == "ipc":
        yield (
            "update_weight_transport",
            f"update_weight_transport ipc and actor_num_nodes {placement.actor_num_nodes}",
            "Shared memory is one machine's: use --update-weight-transport disk with an --update-weight-disk-path that "
            "all machines see",
        )


def _elsewhere(job: Job) -> Iterator[tuple[str, str, str]]:
    """The option, its value, and what to do instead."""
    services = job.services
    yield from _not_started_by_a_service(job)
    if services.num_rollout_services > 1:
        yield "rollout_services", f"{services.num_rollout_services} rollout services", "Use one"
    elif not all(each.is_loopback for each in addresses_of(services.rollout_address)):
        where = f"rollout at {services.rollout_address}"
        yield "rollout_address", where, "Start the rollout service at a loopback address"


def _not_started_by_a_service(job: Job) -> Iterator[tuple[str, str, str]]:
    placement = job.placement
    if placement.rollout_external_engine_addrs:
        yield "rollout_external_engine_addrs", "engines that are started elsewhere", "Let headrace start the engines"
    if placement.rollout_placement != "local":
        where = f"rollout_placement {placement.rollout_placement}"
        yield "rollout_placement", where, "Let the rollout service start the engines"
