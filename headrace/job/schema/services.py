"""The section of a job that says where its services are, and how others reach them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from headrace.job.schema.section import NonNegative, Port, Positive, Seconds, Section
from headrace.wire.limits import MAX_ROLLOUT_SERVICES


class ServicesSection(Section):
    buffer_address: str | None = Field(
        None, description="host:port, or host:port|host:port of a server and its standby; absent: started here."
    )
    rollout_address: str | None = Field(
        None, description="host:port, or host:port,host:port of several rollout services; absent: started here."
    )
    rollout_services: Annotated[Positive, Field(le=MAX_ROLLOUT_SERVICES)] = Field(
        1,
        description="Rollout services on the one ledger that are started here, each with engines, a router and "
        "producers of its own: the trainer publishes to all of them, and one may die while the others go on.",
    )
    rollout_service: NonNegative | None = Field(
        None, description="Which of several in rollout_address, from 0, `headrace up rollout` starts here."
    )
    reward_address: str | None = Field(None, description="host:port; absent: started here.")
    trainer_address: str | None = Field(None, description="host:port to listen on; absent: a free port.")
    service_host: str | None = Field(
        None,
        description="This machine's address, at which other machines reach the services that are started here without "
        "an address of their own; absent: 127.0.0.1, which only this machine reaches.",
    )
    listen_host: str | None = Field(
        None,
        description="Host on which services started here listen, where it is not that of their addresses: 0.0.0.0 or "
        ":: in a container, whose address is a name that others know.",
    )
    metrics_port: Port | None = Field(
        None,
        description="Port of /metrics, for Prometheus, where `headrace up` starts one process: on the host on which "
        "that listens. Absent: a free port that only this machine reaches, named in services.json of the run's folder.",
    )
    tls_dir: Path | None = Field(
        None,
        description="Folder of ca.pem, cert.pem and key.pem (`headrace certs`): calls between services, and metrics, "
        "are encrypted, and both sides show a certificate. Absent: neither, on addresses that only this machine "
        "reaches.",
    )
    tokens_file: Path | None = Field(
        None,
        description="Tokens of callers, and their roles (`headrace tokens`): a caller sends one with each call. With "
        "tls_dir for those whose certificate names no role, or beside one that does; without it on addresses that "
        "only this machine reaches.",
    )
    insecure: bool = Field(
        False,
        description="Listen where other machines can reach without tls_dir: for a network that nobody else is in.",
    )
    buffer_python: str | None = Field(
        None, description="Python of the buffer, or a command that ends with one; absent: headrace's."
    )
    reward_python: str | None = Field(
        None, description="Python of the reward service, or a command that ends with one; absent: headrace's."
    )
    rollout_python: str | None = Field(
        None,
        description="Python of the rollout service and engines, or a command that ends with one; absent: headrace's.",
    )
    trainer_python: str | None = Field(
        None, description="Python of the trainer's ranks, or a command that ends with one; absent: headrace's."
    )
    start_timeout_seconds: Seconds = Field(
        1800.0, description="A service or an engine that does not serve within this time is given up."
    )
    peer_wait_seconds: Seconds = Field(
        300.0, description="The trainer waits this long for a service that does not answer, and rollout for a score."
    )

    def python_of(self, service: str) -> Sequence[str]:
        """The words before `-m services.SERVICE`."""
        given = {
            "buffer": self.buffer_python,
            "reward": self.reward_python,
            "rollout": self.rollout_python,
            "trainer": self.trainer_python,
        }[service]
        return [sys.executable] if given is None else shlex.split(given)

    @property
    def own_host(self) -> str:
        """The host of services that are started here without an address."""
        return (self.service_host or "127.0.0.1").strip("[]")

    @property
    def num_rollout_services(self) -> int:
        """The number of rollout services, wherever they are started."""
        return len(self.rollout_address.split(",")) if self.rollout_address else self.rollout_services
