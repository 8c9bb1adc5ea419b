"""Requests with one key go to one engine: the header that sglang-router's policy `manual` reads, and others ignore."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_HEADER = "X-SMG-Routing-Key"


def routed_by(key: str | None) -> Mapping[str, str]:
    """The headers of a request. A digest, because a key may be long, secret, or nothing that a header can hold."""
    return {} if key is None else {_HEADER: hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}
