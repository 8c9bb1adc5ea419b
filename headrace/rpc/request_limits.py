"""Limits the size of a service's requests by method, with a default for all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.wire.limits import MAX_FIELDS, MAX_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Methods that are not named have MAX_REQUEST_BYTES and MAX_FIELDS."""

    num_bytes: Mapping[str, int] = field(default_factory=dict)
    num_fields: Mapping[str, int] = field(default_factory=dict)

    def most_bytes(self, method: str) -> int:
        """The limit of a request's bytes."""
        return self.num_bytes.get(method, MAX_REQUEST_BYTES)

    def most_fields(self, method: str) -> int:
        """The limit of a request's fields, those of nested messages included."""
        return self.num_fields.get(method, MAX_FIELDS)
