"""Checks of what arrives, each naming the field that is wrong."""

from __future__ import annotations

import math

from headrace.errors import InvalidArgument

MAX_ID_LENGTH = 512


def require(value: str, field: str) -> str:
    """The value. Raises InvalidArgument when it is empty or too long."""
    if not value or len(value) > MAX_ID_LENGTH:
        raise InvalidArgument(f"{field} has {len(value)} characters, must have 1 to {MAX_ID_LENGTH}", field=field)
    return value


def require_some(count: int, field: str) -> None:
    """Raises InvalidArgument when there is none."""
    if count < 1:
        raise InvalidArgument(f"{field} is empty, must have at least one", field=field)


def require_at_most(count: int, most: int, field: str) -> None:
    """Raises InvalidArgument when a call brings more than it may."""
    if count > most:
        raise InvalidArgument(
            f"{field} has {count} entries, a call may have {most} at most: make several calls of it",
            field=field,
            reason="BATCH_TOO_LARGE",
            limit=str(most),
        )


def require_not_negative(value: float, field: str) -> None:
    """Raises InvalidArgument for what cannot be counted."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"{field} is {value}, must be 0 or more", field=field)
