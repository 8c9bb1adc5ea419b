"""The roles that a caller may have."""

from __future__ import annotations

from enum import StrEnum

from headrace.errors import ConfigError


class Role(StrEnum):
    """A caller has one, or two of which each must allow a call.

    `SERVICE` is a run's own services, which the services' certificate shows.
    """

    VIEWER = "viewer"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    TRAINER = "trainer"
    ADMIN = "admin"
    SERVICE = "service"


OF_CLIENTS = tuple(role for role in Role if role is not Role.SERVICE)
"""The roles that a client's certificate may have."""


def role_named(text: str) -> Role:
    """Raises ConfigError for one that there is not."""
    try:
        return Role(text)
    except ValueError:
        raise ConfigError(f"role {text[:80]!r} is none: use one of {', '.join(Role)}") from None
