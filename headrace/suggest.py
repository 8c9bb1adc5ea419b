"""Suggests the known name that is nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CHARACTERS = 128
_NEAR = 0.8
"""A slip of the keys is nearer than this; two different names of a like length usually are not."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like it; None when none is as near as `cutoff`, which 1 would make equality."""
    return next(iter(difflib.get_close_matches(name[:_CHARACTERS], list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X?` for the nearest known name, or nothing when none is near."""
    near = nearest(name, known, cutoff=_NEAR)
    return f": did you mean {near}?" if near else ""
