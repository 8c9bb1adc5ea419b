"""Connects a service to the buffer that its job names."""

from __future__ import annotations

from headrace.client.open import Buffer, open_buffer
from headrace.errors import ConfigError
from headrace.job.schema.services import ServicesSection
from headrace.limits import PEER_WAIT_SECONDS


def buffer_of(services: ServicesSection) -> Buffer:
    """A client whose deadline is PEER_WAIT_SECONDS. Raises ConfigError when the job names no buffer."""
    if services.buffer_address is None:
        raise ConfigError(
            "services.buffer_address is not set: start the buffer and pass --buffer-address host:port",
            field="services.buffer_address",
        )
    return open_buffer(services.buffer_address, deadline_seconds=PEER_WAIT_SECONDS)
