"""The limit of groups in flight follows what engines say, and never goes out of its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.admission import GroupsLimit, is_pressed
from services.rollout.engine.replies import EngineLoad

LOADS = st.lists(
    st.builds(EngineLoad, st.integers(0, 500), st.integers(0, 500), st.floats(0, 1), st.integers(0, 3)), max_size=3
)
FREE = EngineLoad(running=8, waiting=0, cache_usage=0.4)
QUEUED = EngineLoad(running=64, waiting=64, cache_usage=0.6)


class Saturated:
    """Production with more to do than it may: an engine that runs `capacity` groups, and some that end at each look."""

    def __init__(self, limit: GroupsLimit, capacity: int) -> None:
        self.limit, self.capacity = limit, capacity
        self.in_flight = limit.now

    def look(self) -> int:
        running = min(self.in_flight, self.capacity)
        ended = max(1, running // 4)
        self.in_flight = max(self.in_flight - ended, min(self.limit.now, self.in_flight))
        running = min(self.in_flight, self.capacity)
        load = EngineLoad(running, self.in_flight - running, min(1.0, 0.9 * self.in_flight / self.capacity))
        now = self.limit.read([load], self.in_flight)
        self.in_flight = max(self.in_flight, now) if self.in_flight <= now else self.in_flight
        return now


@settings(deadline=None)
@given(most=st.integers(1, 300), readings=st.lists(st.tuples(LOADS, st.integers(0, 400)), max_size=100))
def test_the_limit_is_never_below_one_group_nor_above_the_most(
    most: int, readings: list[tuple[list[EngineLoad], int]]
) -> None:
    limit = GroupsLimit(most)
    for loads, in_flight in readings:
        before = limit.now
        now = limit.read(loads, in_flight)
        assert 1 <= now <= most
        assert now <= before or in_flight >= before, "it rises only where it holds production back"
        assert loads or now == before, "without an answer nothing changes"


@settings(deadline=None)
@given(most=st.integers(1, 300), capacity=st.integers(1, 300))
def test_it_comes_to_rest_where_the_engine_is_full_and_its_queue_short(most: int, capacity: int) -> None:
    production = Saturated(GroupsLimit(most), capacity)
    for _ in range(400):
        production.look()
    later = [production.look() for _ in range(100)]
    assert min(later) >= min(most, max(1, int(0.7 * capacity)))
    assert max(later) <= min(most, 1.4 * capacity + most / 16 + 2)


@settings(deadline=None)
@given(most=st.integers(1, 300), pressed_for=st.integers(0, 200))
def test_it_recovers_once_the_pressure_is_gone(most: int, pressed_for: int) -> None:
    limit = GroupsLimit(most)
    for _ in range(pressed_for):
        limit.read([QUEUED], limit.now)
    for _ in range(2 * 16 + 1):
        limit.read([FREE], limit.now)
    assert limit.now == most


def test_it_falls_only_after_several_readings_and_then_waits_until_so_few_groups_are_left() -> None:
    limit = GroupsLimit(16)
    assert [limit.read([QUEUED], 16) for _ in range(3)] == [16, 16, 12]
    assert [limit.read([QUEUED], 16) for _ in range(9)] == [12] * 9, "groups beyond the limit are still in flight"
    assert [limit.read([QUEUED], 12), limit.read([QUEUED], 12)] == [9, 9]


def test_pressure_that_others_make_while_no_group_is_in_flight_changes_nothing() -> None:
    limit = GroupsLimit(16)
    assert {limit.read([QUEUED], 0) for _ in range(20)} == {16}


def test_a_queue_of_a_moment_changes_nothing() -> None:
    limit = GroupsLimit(16)
    for load in (QUEUED, QUEUED, FREE) * 20:
        limit.read([load], 16)
    assert limit.now == 16


def test_a_full_cache_or_requests_taken_back_are_pressure_and_a_short_queue_is_none() -> None:
    assert is_pressed([FREE, EngineLoad(8, 0, 0.97)])
    assert is_pressed([FREE, EngineLoad(8, 0, 0.5, retracted=1)])
    assert not is_pressed([EngineLoad(64, 10, 0.9), FREE])
    assert not is_pressed([EngineLoad(0, 1, 0.0)])
