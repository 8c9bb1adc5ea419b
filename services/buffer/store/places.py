"""Where every payload that a group holds lies, and how much of a segment that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A payload's record."""

    segment: int
    offset: int
    payload_bytes: int


class Places:
    """Written by one thread at a time, read by any."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._live_bytes: Counter[int] = Counter()
        for place in places.values():
            self._live_bytes[place.segment] += place.payload_bytes

    def get(self, key: str) -> Place | None:
        """None for a payload that is gone."""
        return self._places.get(key)

    def set(self, key: str, place: Place) -> None:
        """It is there from now on."""
        self.drop(key)
        self._places[key] = place
        self._live_bytes[place.segment] += place.payload_bytes

    def drop(self, key: str) -> None:
        """Nobody asks for it any more."""
        old = self._places.pop(key, None)
        if old:
            self._live_bytes[old.segment] -= old.payload_bytes

    def live_bytes(self, segment: int) -> int:
        """Of payloads."""
        return self._live_bytes[segment]
