"""Rules of several rollout services: their number, their addresses, and what they would otherwise share."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import ConfigError, Unavailable
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.limits import LAST_PORT
from headrace.rpc.net import Address, is_ours

_EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104  # refused


def addresses_of(address: str | None) -> Sequence[Address]:
    """Returns the addresses of a service that is started elsewhere, else none. Raises ConfigError for a bad one."""
    return [Address.parse(each) for each in address.split(",")] if address else []


def check_services(job: Job) -> None:
    """Raises ConfigError when addresses and numbers of the rollout services contradict each other."""
    services = job.services
    addresses, count = addresses_of(services.rollout_address), services.rollout_services
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            f"rollout_address {services.rollout_address} has an address twice: give each rollout service its own",
            field="rollout_address",
        )
    if count > 1 and addresses and len(addresses) != count:
        raise ConfigError(
            f"rollout_services {count} contradicts rollout_address, which names {len(addresses)}: leave "
            "--rollout-services out where they are started elsewhere, or leave the address out to have them started "
            "here",
            field="rollout_services",
        )
    if services.rollout_service is not None and addresses and services.rollout_service >= len(addresses):
        raise ConfigError(
            f"rollout_service {services.rollout_service} is not an index of the {len(addresses)} addresses of "
            "rollout_address, which are counted from 0",
            field="rollout_service",
        )
    port = job.rollout.openai_port
    if port is not None and port + services.num_rollout_services - 1 > LAST_PORT:
        raise ConfigError(
            f"openai_port {port}: rollout service k of {services.num_rollout_services} listens k ports above it, and "
            f"there is none above {LAST_PORT}: choose a lower one",
            field="openai_port",
        )


def check_metrics_port(job: Job, scope: Scope) -> None:
    """Raises ConfigError where several processes, started here, would show their metrics at one port."""
    port = job.services.metrics_port
    if port is None or _starts_one(job, scope):
        return
    raise ConfigError(
        f"metrics_port {port} is one process's, and several are started here ({', '.join(scope.services)}): start each "
        "by `headrace up SERVICE`, of shards and rollout services by its number, or leave --metrics-port out",
        field="metrics_port",
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
            "which other machines reach this one",
            field="service_host",
        )
    if not (host.is_loopback or services.tls_dir or services.insecure):
        raise ConfigError(
            f"service_host {host.host} is an address that other machines reach: pass --tls-dir with the folder that "
            "`headrace certs` makes, or --insecure on a network that nobody else is in",
            field="service_host",
        )
    try:
        ours = is_ours(host.host)
    except Unavailable:
        ours = False
    if not ours:
        scope.missing(
            ConfigError(
                f"service_host {host.host} is no address of this machine: name one that `ip address` shows",
                field="service_host",
            )
        )
