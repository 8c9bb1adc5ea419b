"""Did you mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CHARACTERS = 128
_NEAR = 0.8
"""A slip of the keys is nearer than this; two different names of a like length usually are not."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X?` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name[:_CHARACTERS], list(known), n=1, cutoff=_NEAR)
    return f": did you mean {near[0]}?" if near else ""
