"""The number of groups that may be generated at once: additive increase, multiplicative decrease.

Engines are pressed while many requests wait for a place among the running ones, or while their key-value cache is
nearly full, so that they would soon take running requests back and compute their prefixes again. The limit then falls
to three quarters of what is in flight, and falls again only once so few groups are left; without pressure it rises, a
sixteenth of the most at a time, whenever it is what holds production back. It stays between 1 and the most. While no
group is in flight, pressure is made by others and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engine.answers.load import EngineLoad

_WAITING_SHARE = 0.25
"""Requests that may wait for each running one: an engine without any is soon not full."""
_FULL_CACHE = 0.95
_PATIENCE = 3
"""Readings in a row that must show pressure: new weights, and groups that begin together, make a queue for a moment."""
_DECREASE = 0.75
_STEPS = 16


def is_pressed(loads: Sequence[EngineLoad]) -> bool:
    """True when one engine's cache is nearly full, or too many requests wait at all of them together."""
    waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
    is_full = any(load.retracted or load.cache_usage >= _FULL_CACHE for load in loads)
    return is_full or waiting > max(1.0, _WAITING_SHARE * running)


class GroupsLimit:
    """`now` groups may be in flight; it begins with `most`."""

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._pressed = 0

    def read(self, loads: Sequence[EngineLoad], in_flight: int) -> int:
        """Takes one reading of the engines that answered, and returns the limit from now on."""
        if not loads:
            return self.now
        self._pressed = self._pressed + 1 if is_pressed(loads) else 0
        if self._pressed >= _PATIENCE and 0 < in_flight <= self.now:
            self.now, self._pressed = max(1, int(_DECREASE * in_flight)), 0
        elif not self._pressed and in_flight >= self.now:
            self.now = min(self.most, self.now + max(1, self.most // _STEPS))
        return self.now
