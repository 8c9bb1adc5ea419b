"""1 or 0 by chance, the same each time for the same sample: to try a run without a scorer."""

from __future__ import annotations

import blake3

from headrace.score import ScoreItem


def score(item: ScoreItem) -> float:
    """A coin that the sample's id and response throw: a repeated call scores the same."""
    digest = blake3.blake3(f"{item.item_id}\0{item.response}".encode("utf-8", "surrogatepass")).digest(length=1)
    return float(digest[0] & 1)
