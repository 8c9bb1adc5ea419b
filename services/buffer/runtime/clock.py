"""The time, for the parts of the buffer that live in it."""

from __future__ import annotations

import time

from services.buffer.ledger.transaction import Instant


def now() -> Instant:
    """On both clocks."""
    return Instant(time.monotonic(), time.time())
