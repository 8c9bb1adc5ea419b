"""Which connections of an HTTP port are closed for others."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.rpc.http.visits import Visits


@dataclass(eq=False)
class Guest:
    host: str
    name: str
    closed: list[str] = field(default_factory=list)

    def close(self) -> None:
        self.closed.append(self.name)


def test_of_too_many_silent_connections_the_oldest_are_closed_and_no_other_addresss() -> None:
    visits, closed = Visits(most=100, most_per_peer=10, most_silent=3), list[str]()
    other = Guest("b", "other", closed)
    assert visits.enter(other)
    speaking = Guest("a", "speaking", closed)
    assert visits.enter(speaking)
    visits.speaks(speaking)
    for number in range(5):
        assert visits.enter(Guest("a", f"a{number}", closed))
    assert closed == ["a0", "a1"]
    assert len(visits) == 5
    visits.silent(speaking)
    assert closed == ["a0", "a1", "a2"], "after its answer it is the youngest"


def test_a_new_connection_is_refused_only_where_all_others_speak() -> None:
    visits, closed = Visits(most=3, most_per_peer=2, most_silent=5), list[str]()
    first, second = Guest("a", "1", closed), Guest("a", "2", closed)
    for each in (first, second):
        assert visits.enter(each)
        visits.speaks(each)
    assert not visits.enter(Guest("a", "3", closed))
    assert visits.enter(Guest("b", "4", closed))
    assert visits.enter(Guest("c", "5", closed))
    assert closed == ["4"], "of all addresses the longest silent"
    visits.leave(first)
    visits.leave(first)
    assert visits.enter(Guest("a", "6", closed))
    assert (closed, len(visits)) == (["4"], 3)


def test_an_address_whose_connections_have_left_leaves_no_trace() -> None:
    visits = Visits()
    for number in range(5):
        guest = Guest(f"address {number}", "gone", [])
        assert visits.enter(guest)
        visits.leave(guest)
        visits.silent(guest)  # it left while its request was answered
    assert not any((visits._silent, visits._of_host, visits._silent_of_host))
