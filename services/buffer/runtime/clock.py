"""Reads the time for those parts of the buffer that need it."""

from __future__ import annotations

import time

from services.buffer.ledger.transaction import Instant


def now() -> Instant:
    return Instant(time.monotonic(), time.time())
