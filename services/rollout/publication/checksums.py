"""Compares the weights in engines with those that were sent.

An engine hashes in the thread that generates: it is asked for a slice at a time, and generates between two slices.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from services.rollout.engine.client import EngineClient
from services.rollout.publication.state import Plan

_SLICE_BYTES = 64 << 20  # some 50 ms of one core
_MOST_SLICES = 32
_LAYER = re.compile(r".*?\.\d+\.")
_TIED = frozenset({"lm_head.weight"})
"""The output layer: with tied embeddings the sender may send it although the engine does not have it."""


async def read(
    plan: Plan, expected: Mapping[str, str], engine: EngineClient, *, seconds: float
) -> list[dict[str, str]]:
    """Returns name → checksum of every tensor, for each rank of an engine; `seconds` limit each slice."""
    found: list[dict[str, str]] = []
    for skipped in slices(plan) if expected else [[]]:
        ranks = await engine.checksums(skipped=skipped, seconds=seconds)
        found = [old | new for old, new in zip(found, ranks, strict=True)] if found else ranks
    if all(expected.keys() - _TIED <= rank.keys() for rank in found):
        return found
    return await engine.checksums(seconds=seconds)  # a name that contains another slice's is in none


def slices(plan: Plan) -> list[list[str]]:
    """Returns what to leave out of each slice: layers, and names of tensors outside of them.

    With FP8 there is one slice: an engine hashes its FP8 weights whatever it is told to leave out.
    """
    if any(tensor.dtype == "float8_e4m3fn" for tensors in plan.buckets.values() for tensor in tensors):
        return [[]]
    num_bytes: dict[str, int] = {}
    for tensors in plan.buckets.values():
        for tensor in tensors:
            layer = _LAYER.match(tensor.name)
            part = layer[0] if layer else tensor.name
            num_bytes[part] = num_bytes.get(part, 0) + tensor.num_bytes
    most_bytes = max(_SLICE_BYTES, sum(num_bytes.values()) // _MOST_SLICES)
    kept: list[set[str]] = [set()]
    filled = 0
    for part, size in num_bytes.items():
        if kept[-1] and filled + size > most_bytes:
            kept.append(set())
            filled = 0
        kept[-1].add(part)
        filled += size
    return [[part for part in num_bytes if part not in parts] for parts in kept]


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
