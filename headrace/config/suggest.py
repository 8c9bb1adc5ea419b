"""Did you mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CHARACTERS = 128


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X?` for the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(name[:_CHARACTERS], list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""
