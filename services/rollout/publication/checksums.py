"""Compares the weights in engines with those that were sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

_TIED = frozenset({"lm_head.weight"})
"""With tied embeddings the sender may send it although the engine does not have it."""


def digest(ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns one hexadecimal digest over all ranks' checksums, equal for equal weights."""
    hasher = hashlib.sha256()
    for number, rank in enumerate(ranks):
        for name in sorted(rank):
            hasher.update(f"{number}\0{name}\0{rank[name]}\n".encode())
    return hasher.hexdigest()


def differences(expected: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> str | None:
    """Says what differs from the sender's checksums, or returns None. Each rank is compared with all of them."""
    for rank in ranks:
        wrong = [name for name, checksum in expected.items() if name in rank and rank[name] != checksum]
        absent = sorted(expected.keys() - rank.keys() - _TIED)
        if wrong or absent:
            uncovered = sorted(rank.keys() - expected.keys())
            parts = [f"{len(wrong)} of {len(expected)} tensors differ"]
            if wrong:
                name = wrong[0]
                parts.append(f"first {name}: sent {expected[name]}, engine has {rank[name]}")
            if absent:
                parts.append(f"the engine has no {_some(absent)}")
            if uncovered:
                parts.append(f"the sender says nothing about {_some(uncovered)}")
            return "; ".join(parts)
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
