"""A long run of random commands on a ledger, and what it was after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.produce import PutOutcome, Release
from services.buffer.ledger.stream import StreamState
from services.buffer.ledger.work import Result
from services.buffer.store.base import Snapshot, Store
from tests.support.ledgers.ledger_under_test import LedgerUnderTest, complete, sample, without_samples

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Moment:
    """The ledger after a command was answered."""

    state: StreamState
    groups: Mapping[str, Group]
    position: int

    def equals(self, snapshot: Snapshot) -> bool:
        return snapshot.streams == (self.state,) and {g.group_id: g for g in snapshot.groups} == self.groups


@dataclass
class History:
    """Runs commands; `moments` has the ledger after each, `payloads` everything ever put."""

    store: Store
    seed: int = 1
    on_answer: Callable[[], None] = lambda: None
    retain_events: int | None = None
    moments: list[Moment] = field(default_factory=list)
    payloads: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.it = _Noting(self.store, retain_events=self.retain_events)
        self.it.note = self._note
        self._chance = random.Random(self.seed)
        self._epoch = 0
        self.it.create(max_staleness=None)

    def run(self, num_operations: int) -> None:
        """That many commands more, each with its moment."""
        for _ in range(num_operations):
            self.step()

    def step(self) -> None:
        """One command."""
        choice = self._chance.random()
        groups = self.it.ledger.stream("train").groups.values()
        leased = [g for g in groups if g.state is GroupState.LEASED]
        step = self.it.ledger.stream("train").state.step
        if self._epoch == 0 or choice < 0.02:
            self._epoch = self.it.rewind(max(self.it.ledger.stream("train").state.committed_step, step - 2))
        elif choice < 0.25:
            self.it.submit(*(f"p{self.it.ledger.position}/{i}" for i in range(self._chance.randint(1, 3))))
        elif choice < 0.45:
            self.it.lease(self._chance.randint(1, 3))
        elif choice < 0.75 and leased:
            self._end(leased[: self._chance.randint(1, 2)])
        elif choice < 0.9 and self.it.batch(self._epoch, step):
            self.it.consume(self._epoch, step)
        elif choice < 0.95:
            self.it.commit(self._epoch, step)

    def _end(self, leased: list[Group]) -> None:
        kind = self._chance.random()
        text = "".join(self._chance.choices("abcdefgh", k=self._chance.randint(0, 1500)))
        if kind < 0.8:
            puts = [complete(group, text=text) for group in leased]
            self.payloads.update((s.record.key, s.payload) for put in puts for s in put.samples)
            self.it.do(self.it.ledger.put(self.it.now, puts))
        elif kind < 0.9:
            partial = sample(leased[0], 0, 0, text=text)
            self.payloads[partial.record.key] = partial.payload
            self.it.do(self.it.ledger.release(self.it.now, [Release(leased[0].lease.lease_id, (partial,), "x")]))
        else:
            self.it.do(self.it.ledger.put(self.it.now, [without_samples(leased[0], PutOutcome.DROPPED)]))

    def _note(self) -> None:
        stream = self.it.ledger.stream("train")
        self.moments.append(Moment(stream.state, dict(stream.groups), self.it.ledger.position))
        self.on_answer()


class _Noting(LedgerUnderTest):
    """Tells of every answer."""

    note: Callable[[], None]

    def do(self, result: Result[_Answer]) -> _Answer:
        answer = super().do(result)
        self.note()
        return answer
