"""Shares of training, evaluations and clients: pure, and over every order of events."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.admission import Kind, Shares

WAITING = (Kind.EVALUATION, Kind.CLIENTS)
SLOTS = st.fixed_dictionaries({kind: st.integers(1, 6) for kind in Kind})
EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "end", "leave", "train", "trained"]), st.sampled_from(WAITING)),
    max_size=120,
)


def drained(shares: Shares) -> list[Kind]:
    begun = []
    while (kind := shares.next()) is not None:
        begun.append(kind)
    return begun


def happened(shares: Shares, event: str, kind: Kind) -> None:
    """What is not possible now does not happen."""
    if event == "come":
        shares.wait(kind)
    elif event == "end" and shares.in_use(kind):
        shares.free(kind)
    elif event == "leave" and shares.waiting(kind):
        shares.give_up(kind)
    elif event == "train" and shares.in_use(Kind.TRAINING) < shares.slots(Kind.TRAINING):
        shares.take(Kind.TRAINING)
    elif event == "trained" and shares.in_use(Kind.TRAINING):
        shares.free(Kind.TRAINING)


@settings(deadline=None)
@given(slots=SLOTS, events=EVENTS)
def test_nobody_waits_while_a_slot_is_free_and_whoever_waits_has_its_own_in_use(
    slots: Mapping[Kind, int], events: list[tuple[str, Kind]]
) -> None:
    shares, total = Shares(slots), sum(slots.values())
    for event, kind in events:
        happened(shares, event, kind)
        drained(shares)
        in_use = {each: shares.in_use(each) for each in Kind}
        for waiting in (each for each in WAITING if shares.waiting(each)):
            assert sum(in_use.values()) >= total
            assert in_use[waiting] >= slots[waiting]
        assert sum(in_use.values()) < 2 * total
        assert in_use[Kind.TRAINING] <= slots[Kind.TRAINING], "and training never waited"


@settings(deadline=None)
@given(slots=SLOTS, flood=st.sampled_from(WAITING), count=st.integers(1, 30))
def test_a_flood_of_one_kind_starves_no_other(slots: Mapping[Kind, int], flood: Kind, count: int) -> None:
    other = Kind.CLIENTS if flood is Kind.EVALUATION else Kind.EVALUATION
    shares = Shares(slots)
    for _ in range(count):
        shares.wait(flood)
    drained(shares)
    for _ in range(slots[other]):
        shares.wait(other)
    assert drained(shares).count(other) == slots[other]


def test_what_is_lent_comes_back_as_it_ends_and_goes_to_the_kind_with_least_for_its_slots() -> None:
    shares = Shares({Kind.TRAINING: 8, Kind.EVALUATION: 4, Kind.CLIENTS: 1})
    for kind, count in ((Kind.EVALUATION, 20), (Kind.CLIENTS, 20)):
        for _ in range(count):
            shares.wait(kind)
    drained(shares)
    assert (shares.in_use(Kind.EVALUATION), shares.in_use(Kind.CLIENTS)) == (10, 3)
    shares.take(Kind.TRAINING, 8)
    for _ in range(7):
        shares.free(Kind.EVALUATION)
    assert drained(shares) == [Kind.EVALUATION], "training is back: only own slots are handed out"


def test_a_kind_that_is_alone_has_as_many_as_alone_says() -> None:
    shares = Shares({Kind.TRAINING: 2, Kind.EVALUATION: 1, Kind.CLIENTS: 1}, alone=16)
    for _ in range(20):
        shares.wait(Kind.EVALUATION)
    assert len(drained(shares)) == 16
    shares.take(Kind.TRAINING)
    shares.free(Kind.EVALUATION, 13)
    assert drained(shares) == []
    shares.free(Kind.EVALUATION, 2)
    assert len(drained(shares)) == 2


def test_slots_that_are_taken_away_are_not_handed_out_again() -> None:
    shares = Shares({Kind.TRAINING: 8, Kind.CLIENTS: 1})
    shares.resize(Kind.TRAINING, 1)
    for _ in range(5):
        shares.wait(Kind.CLIENTS)
    assert (len(drained(shares)), shares.room(Kind.CLIENTS), shares.waiting(Kind.CLIENTS)) == (2, 0, 3)
