"""A client for the buffer that a job names: one, or the shards of one."""

from __future__ import annotations

from headrace.client.buffer import BufferClient
from headrace.client.port import DEFAULT_DEADLINE_SECONDS, Buffer
from headrace.client.shards import ShardedBuffer
from headrace.config.job import ServicesSection
from headrace.errors import ConfigError


def open_buffer(address: str, *, deadline_seconds: float = DEFAULT_DEADLINE_SECONDS) -> Buffer:
    """Connects lazily. Several addresses with commas between them are the shards of one ledger, in their order."""
    addresses = address.split(",")
    if len(addresses) == 1:
        return BufferClient(address, deadline_seconds=deadline_seconds)
    return ShardedBuffer(addresses, deadline_seconds=deadline_seconds)


def buffer_of(services: ServicesSection) -> Buffer:
    """The job's buffer, with the patience of `peer_wait_seconds`. Raises ConfigError when the job names none."""
    if services.buffer_address is None:
        raise ConfigError(
            "services.buffer_address is not set: start the buffer and pass --buffer-address host:port",
            field="services.buffer_address",
        )
    return open_buffer(services.buffer_address, deadline_seconds=services.peer_wait_seconds)
