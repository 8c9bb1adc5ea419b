"""Rules of --colocate: trainer and engines take turns on the GPUs of one machine."""

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
    for field, what, instead in _elsewhere(job):
        raise ConfigError(
            f"colocate with {what}: trainer and engines share the GPUs and the memory of one machine. {instead}, or "
            "leave --colocate out",
            field=field,
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
    if placement.rollout_num_gpus != placement.num_ranks:
        raise ConfigError(
            f"colocate with rollout_num_gpus {placement.rollout_num_gpus} and {placement.num_ranks} of the trainer "
            f"(actor_num_nodes {placement.actor_num_nodes} x actor_num_gpus_per_node "
            f"{placement.actor_num_gpus_per_node}): engines are on the trainer's GPUs. Leave --rollout-num-gpus out",
            field="rollout_num_gpus",
        )


def _elsewhere(job: Job) -> Iterator[tuple[str, str, str]]:
    """The option, its value, and what to do instead."""
    placement, services = job.placement, job.services
    if placement.actor_num_nodes > 1:
        yield "actor_num_nodes", f"actor_num_nodes {placement.actor_num_nodes}", "Use one machine"
    if placement.rollout_external_engine_addrs:
        yield "rollout_external_engine_addrs", "engines that are started elsewhere", "Let headrace start the engines"
    if placement.rollout_placement != "local":
        where = f"rollout_placement {placement.rollout_placement}"
        yield "rollout_placement", where, "Let the rollout service start the engines"
    if services.num_rollout_services > 1:
        yield "rollout_services", f"{services.num_rollout_services} rollout services", "Use one"
    elif not all(each.is_loopback for each in addresses_of(services.rollout_address)):
        where = f"rollout at {services.rollout_address}"
        yield "rollout_address", where, "Start the rollout service at a loopback address"
