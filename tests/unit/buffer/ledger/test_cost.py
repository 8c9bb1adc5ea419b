"""The cost of a command does not grow with the groups the ledger holds, counted in calls and not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from tests.support.ledgers.ledger_under_test import LedgerUnderTest


def calls_of(work: Callable[[], object]) -> int:
    """Function calls made meanwhile, those of generators' steps and of built-ins included."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def with_groups(count: int) -> tuple[LedgerUnderTest, int]:
    """A ledger that holds `count` groups in each of four states."""
    it = LedgerUnderTest()
    it.create(max_staleness=None, groups_per_step=2)
    it.submit(*(f"p{i}" for i in range(4 * count)))
    epoch = it.rewind()
    it.put(it.lease(2 * count))
    it.lease(count)
    for step in range(count // 2):
        it.consume(epoch, step)
    return it, epoch


@pytest.mark.parametrize("command", ["submit", "lease", "put", "step", "renew", "expire", "list"])
def test_a_command_costs_the_same_with_fifty_times_the_groups(command: str) -> None:
    def cost(count: int) -> float:
        """Of one command, as the mean of `count` / 4: indexes are tidied up now and then."""
        it, epoch = with_groups(count)
        groups = it.lease(count // 4)
        steps = iter(range(it.ledger.stream("train").state.step, count))
        commands: dict[str, Callable[[int], object]] = {
            "submit": lambda i: it.submit(f"new {i}"),
            "lease": lambda i: it.lease(1),
            "put": lambda i: it.put([groups[i]]),
            "step": lambda i: it.consume(epoch, next(steps)),
            "renew": lambda i: it.ledger.renew(it.now, [groups[i].lease.lease_id]),
            "expire": lambda i: it.ledger.expire_leases(it.now),
            "list": lambda i: it.ledger.list_groups("train", (), None, 10),
        }
        return calls_of(lambda: [commands[command](i) for i in range(count // 4)]) / (count // 4)

    assert cost(1000) <= cost(20) * 1.5
