"""Limits what is asked of the engines at once: shares of training, evaluations and clients, and the limit of groups.

Comes in: who wants to ask, and what engines say about their load. Goes out: who may ask now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import StrEnum

from headrace.errors import DeadlineExceeded, HeadraceError, ResourceExhausted
from headrace.rpc.log import kept_running, log
from services.rollout.engine.fleet import Engine, EngineState
from services.rollout.engine.replies import EngineLoad

# The shares of the engines: slots for each kind of request, lent to others while they are free.
# A kind may always use its own slots. Beyond them it borrows, as long as not all slots of all kinds are in use. What is
# lent is not taken back before its request ends, so all kinds together may for a while have more in use than there are
# slots: less than twice as many. Nobody waits while a slot is free, and a kind that waits has its own slots in use.


class Kind(StrEnum):
    """The kind of a request."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    CLIENTS = "clients"
    """Generate, and the OpenAI endpoint without a session."""


class Shares:
    """Counts requests in use and waiting, by their kind or by another name.

    A kind alone may have `alone` in use, where all slots are fewer; none has more than `most`, whatever is free.
    """

    def __init__(
        self, slots: Mapping[Kind, int] | Mapping[str, int], *, alone: int = 0, most: int | None = None
    ) -> None:
        self._slots: dict[str, int] = {str(kind): count for kind, count in slots.items()}
        self._alone = alone
        self._most = most
        self._in_use = Counter[str]()
        self._waiting = Counter[str]()

    @property
    def names(self) -> Sequence[str]:
        """Those that have slots of their own."""
        return list(self._slots)

    def slots(self, kind: str) -> int:
        """Returns the kind's own slots."""
        return self._slots.get(kind, 0)

    def in_use(self, kind: str) -> int:
        """Returns the requests of the kind that are at the engines."""
        return self._in_use[kind]

    def waiting(self, kind: str) -> int:
        """Returns the requests of the kind that wait."""
        return self._waiting[kind]

    def resize(self, kind: str, slots: int) -> None:
        """Changes a kind's own slots; what is in use stays."""
        self._slots[kind] = slots

    def remove(self, kind: str) -> None:
        """The kind has no slots of its own any more."""
        self._slots.pop(kind, None)

    def take(self, kind: str, count: int = 1) -> None:
        """Counts requests that begin without waiting."""
        self._in_use[kind] += count

    def free(self, kind: str, count: int = 1) -> None:
        """Counts requests that ended."""
        self._in_use[kind] -= count

    def wait(self, kind: str) -> None:
        """Counts a request that waits for `next`."""
        self._waiting[kind] += 1

    def give_up(self, kind: str) -> None:
        """Counts a request that waits no more."""
        self._waiting[kind] -= 1

    def next(self) -> str | None:
        """Begins the next waiting request and returns its kind; None while none may begin.

        Kinds with own slots left come first, then the one that has least in use for its slots.
        """
        able = [kind for kind in {**self._slots, **self._waiting} if self._waiting[kind] and self._room(kind) > 0]
        if not able:
            return None
        chosen = min(able, key=lambda kind: (self._own_room(kind) <= 0, self._in_use[kind] / max(1, self.slots(kind))))
        self._waiting[chosen] -= 1
        self._in_use[chosen] += 1
        return chosen

    def room(self, kind: str) -> int:
        """Returns how many more requests of the kind could begin now, if no others came."""
        return max(self._room(kind) - self._waiting[kind], 0)

    def _room(self, kind: str) -> int:
        total = sum(self._slots.values())
        if not any(self._in_use[other] or self._waiting[other] for other in {*self._in_use, *self._waiting} - {kind}):
            total = max(total, self._alone)
        room = max(self._own_room(kind), total - sum(self._in_use.values()))
        return room if self._most is None else min(room, self._most - self._in_use[kind])

    def _own_room(self, kind: str) -> int:
        return self.slots(kind) - self._in_use[kind]


_RETRY_SECONDS = 5.0


class EngineSlots:
    """Hands out slots. At most `max_waiting` requests of clients wait."""

    def __init__(self, shares: Shares, *, max_waiting: int = 0) -> None:
        self.shares = shares
        self._max_waiting = max_waiting
        self._queues: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)

    @contextlib.contextmanager
    def training(self, count: int) -> Iterator[None]:
        """Counts samples of training, which never wait here: their groups were leased within a limit of their own."""
        self.shares.take(Kind.TRAINING, count)
        try:
            yield
        finally:
            self._free(Kind.TRAINING, count)

    @contextlib.asynccontextmanager
    async def slot(self, kind: str, *, seconds: float | None = None) -> AsyncIterator[None]:
        """Waits for a slot. Raises DeadlineExceeded after `seconds`, ResourceExhausted when too many clients wait."""
        if kind is Kind.CLIENTS:
            self.require_room(1)
        turn = asyncio.get_running_loop().create_future()
        self._queues[kind].append(turn)
        self.shares.wait(kind)
        self._grant()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._give_up, kind, turn)
            try:
                async with asyncio.timeout(seconds):
                    await turn
            except TimeoutError as error:
                raise DeadlineExceeded(f"no engine was free within {seconds:g} s: ask again later") from error
            on_failure.pop_all()
        try:
            yield
        finally:
            self._free(kind)

    def require_room(self, count: int) -> None:
        """Raises ResourceExhausted unless `count` more requests of clients may begin or wait."""
        waiting = self.shares.waiting(Kind.CLIENTS)
        if count > self.shares.room(Kind.CLIENTS) + self._max_waiting - waiting:
            raise ResourceExhausted(
                f"{waiting} requests of clients wait for an engine and {count} more would exceed the "
                f"{self._max_waiting} that may: ask again in {_RETRY_SECONDS:g} s",
                retry_after_seconds=_RETRY_SECONDS,
                reason="TOO_MANY_WAITING",
            )

    def share(self, names: Sequence[str], slots: int) -> None:
        """From now on these share the slots evenly, and no others."""
        for gone in set(self.shares.names).difference(names):
            self.shares.remove(gone)
        for name in names:
            self.shares.resize(name, max(1, slots // len(names)))
        self._grant()

    def resize(self, kind: str, slots: int) -> None:
        """Changes a kind's own slots."""
        self.shares.resize(kind, slots)
        self._grant()

    def _free(self, kind: str, count: int = 1) -> None:
        self.shares.free(kind, count)
        self._grant()

    def _give_up(self, kind: str, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # its turn came in the moment in which it left
            self._free(kind)
        else:
            self._grant()

    def _grant(self) -> None:
        for kind, queue in list(self._queues.items()):
            for turn in [turn for turn in queue if turn.cancelled()]:
                queue.remove(turn)
                self.shares.give_up(kind)
        while (begun := self.shares.next()) is not None:
            self._queues[begun].popleft().set_result(None)


# The number of groups that may be generated at once: additive increase, multiplicative decrease.
# Engines are pressed while many requests wait for a place among the running ones, or while their key-value cache is
# nearly full, so that they would soon take running requests back and compute their prefixes again. The limit then falls
# to three quarters of what is in flight, and falls again only once so few groups are left; without pressure it rises, a
# sixteenth of the most at a time, whenever it is what holds production back. It stays between 1 and the most. While no
# group is in flight, pressure is made by others and changes nothing.

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


_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class LoadWatch:
    """States: built → started → stopped. `groups_in_flight` is asked, and `changed` told the limit, at each look."""

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        limit: GroupsLimit,
        groups_in_flight: Callable[[], int],
        changed: Callable[[int], None],
        ended: Callable[[str], None],
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._engines = engines
        self._limit = limit
        self._groups_in_flight = groups_in_flight
        self._changed = changed
        self._ended = ended
        self._look_seconds = look_seconds
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(kept_running("watch the engines' load", self._look_for_ever, self._ended))

    async def stop(self) -> None:
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            await self.look()

    async def look(self) -> None:
        """Reads every engine in routing. One that does not answer says nothing, and none at all changes nothing."""
        serving = [engine for engine in self._engines() if engine.state is EngineState.READY]
        answers = await asyncio.gather(*(_load_of(engine) for engine in serving))
        before = self._limit.now
        now = self._limit.read([load for load in answers if load], self._groups_in_flight())
        if now != before:
            log.info("groups_limit_changed", before=before, now=now, most=self._limit.most)
            self._changed(now)


async def _load_of(engine: Engine) -> EngineLoad | None:
    try:
        return await engine.client.load(seconds=_ANSWER_SECONDS)
    except HeadraceError as error:
        log.info("engine_load_unknown", engine=engine.engine_id, error=error.message)
        return None
