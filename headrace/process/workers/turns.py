"""Assigns free slots: callers take turns, and one who holds none need not wait for those who hold all.

A caller is a pair (peer, call). Peers take turns first, then the calls of a peer; within a call it is first come, first
served. The guest's slot goes only to a call that holds no other. Every other free slot goes to the next caller.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Caller = tuple[str, int]
Place = TypeVar("Place")
_Queue = deque[asyncio.Future[Place]]


class Turns(Generic[Place]):
    """The free slots and the callers that wait. Not for several threads."""

    def __init__(self, places: Sequence[Place], guest: Place | None) -> None:
        self._free = list(places)
        self._guest = guest
        self._guest_is_free = guest is not None
        self._peers: OrderedDict[str, OrderedDict[Caller, _Queue[Place]]] = OrderedDict()
        self._held: Counter[Caller] = Counter()
        self.waiting = 0

    async def take(self, caller: Caller) -> Place:
        """Returns a slot, at once or in turn."""
        if self._free:
            return self._given(caller, self._free.pop())
        if self._guest is not None and self._guest_is_free and not self._held[caller]:
            self._guest_is_free = False
            return self._given(caller, self._guest)
        turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._peers.setdefault(caller[0], OrderedDict()).setdefault(caller, deque()).append(turn)
        self.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(caller, turn.result())
            else:
                self._leave(caller, turn)
            raise

    def give(self, caller: Caller, place: Place) -> None:
        """Returns the slot of a caller that is done with it."""
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        following = self._next(only_without_place=place is self._guest)
        while following is not None and following[1].cancelled():  # gone, and not woken yet to leave the line itself
            following = self._next(only_without_place=place is self._guest)
        if following is not None:
            self._given(following[0], place)
            following[1].set_result(place)
        elif place is self._guest:
            self._guest_is_free = True
        else:
            self._free.append(place)

    def _given(self, caller: Caller, place: Place) -> Place:
        self._held[caller] += 1
        return place

    def _next(self, *, only_without_place: bool) -> tuple[Caller, asyncio.Future[Place]] | None:
        """Chooses the next caller, and moves it to the end of the line."""
        for peer, calls in self._peers.items():
            caller, queue = next(iter(calls.items()))
            if only_without_place and self._held[caller]:
                continue
            turn = queue.popleft()
            calls.move_to_end(caller)
            self._peers.move_to_end(peer)
            self._tidy(caller)
            self.waiting -= 1
            return caller, turn
        return None

    def _leave(self, caller: Caller, turn: asyncio.Future[Place]) -> None:
        calls = self._peers.get(caller[0])
        if calls is None or turn not in calls.get(caller, ()):
            return  # a place that came meanwhile went past it
        calls[caller].remove(turn)
        self._tidy(caller)
        self.waiting -= 1

    def _tidy(self, caller: Caller) -> None:
        calls = self._peers[caller[0]]
        if not calls[caller]:
            del calls[caller]
        if not calls:
            del self._peers[caller[0]]
