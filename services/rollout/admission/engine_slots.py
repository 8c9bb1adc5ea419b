"""Requests wait here for the engines, each kind in its own queue. Who leaves, waiting or not, frees its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator

from headrace.errors import DeadlineExceeded, ResourceExhausted
from services.rollout.admission.shares import Kind, Shares

_RETRY_SECONDS = 5.0


class EngineSlots:
    """Hands out slots. At most `max_waiting` requests of clients wait."""

    def __init__(self, shares: Shares, *, max_waiting: int) -> None:
        self.shares = shares
        self._max_waiting = max_waiting
        self._queues: dict[Kind, deque[asyncio.Future[None]]] = {kind: deque() for kind in Kind}

    @contextlib.contextmanager
    def training(self, count: int) -> Iterator[None]:
        """Counts samples of training, which never wait here: their groups were leased within a limit of their own."""
        self.shares.take(Kind.TRAINING, count)
        try:
            yield
        finally:
            self._free(Kind.TRAINING, count)

    @contextlib.asynccontextmanager
    async def slot(self, kind: Kind, *, seconds: float | None = None) -> AsyncIterator[None]:
        """Waits for a slot. Raises DeadlineExceeded after `seconds`, ResourceExhausted when too many clients wait."""
        if kind is Kind.CLIENTS:
            self.require_room(1)
        turn = asyncio.get_running_loop().create_future()
        self._queues[kind].append(turn)
        self.shares.wait(kind)
        self._grant()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            self._give_up(kind, turn)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no engine was free within {seconds:g} s: ask again later") from error
            raise
        try:
            yield
        finally:
            self._free(kind)

    def require_room(self, count: int) -> None:
        """Raises ResourceExhausted unless `count` more requests of clients may begin or wait."""
        waiting = self.shares.waiting(Kind.CLIENTS)
        if count > self.shares.room(Kind.CLIENTS) + self._max_waiting - waiting:
            raise ResourceExhausted(
                f"{waiting} requests of clients wait for an engine and {count} more would exceed max_waiting_requests "
                f"{self._max_waiting}: ask again in {_RETRY_SECONDS:g} s, or start the service with a larger one",
                retry_after_seconds=_RETRY_SECONDS,
                reason="TOO_MANY_WAITING",
            )

    def resize(self, kind: Kind, slots: int) -> None:
        """Changes a kind's own slots."""
        self.shares.resize(kind, slots)
        self._grant()

    def _free(self, kind: Kind, count: int = 1) -> None:
        self.shares.free(kind, count)
        self._grant()

    def _give_up(self, kind: Kind, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # its turn came in the moment in which it left
            self._free(kind)
        else:
            self._grant()

    def _grant(self) -> None:
        for kind, queue in self._queues.items():
            for turn in [turn for turn in queue if turn.cancelled()]:
                queue.remove(turn)
                self.shares.give_up(kind)
        while (begun := self.shares.next()) is not None:
            self._queues[begun].popleft().set_result(None)
