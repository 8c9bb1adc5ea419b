"""One retry loop with one deadline: what it tries again, and which error it raises at the end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest

from headrace.errors import DeadlineExceeded, HeadraceError, InvalidArgument, ResourceExhausted, Unavailable
from headrace.rpc.retry import retry_until

AWAY = Unavailable("it restarts", retry_after_seconds=0.0)


def failing_with(*errors: HeadraceError) -> tuple[Callable[[float], Awaitable[str]], list[float]]:
    """An attempt that raises each error once and then succeeds, and the seconds that each attempt was given."""
    given: list[float] = []

    async def attempt(left_seconds: float) -> str:
        given.append(left_seconds)
        if len(given) <= len(errors):
            raise errors[len(given) - 1]
        return "done"

    return attempt, given


async def test_it_tries_until_it_succeeds_and_every_attempt_is_given_what_is_left() -> None:
    attempt, given = failing_with(AWAY, AWAY)
    assert await retry_until(time.monotonic() + 60, attempt) == "done"
    assert 60 >= given[0] > given[1] > given[2] > 0


@pytest.mark.parametrize("error", [InvalidArgument("epoch is -1"), ResourceExhausted("full"), DeadlineExceeded("late")])
async def test_what_a_retry_cannot_help_is_raised_at_once(error: HeadraceError) -> None:
    attempt, given = failing_with(error)
    with pytest.raises(type(error), match=error.message):
        await retry_until(time.monotonic() + 60, attempt)
    assert len(given) == 1


@pytest.mark.parametrize("errors", [[AWAY, DeadlineExceeded("late")], [DeadlineExceeded("late"), AWAY]])
async def test_the_cause_is_raised_rather_than_the_expired_deadline(errors: list[HeadraceError]) -> None:
    attempt, given = failing_with(*errors, InvalidArgument("one attempt too many"))
    with pytest.raises(Unavailable, match="it restarts"):
        await retry_until(time.monotonic() + 60, attempt, lambda _: len(given) == 1)


async def test_it_ends_at_the_deadline_however_long_the_server_asks_it_to_wait() -> None:
    attempt, given = failing_with(*[Unavailable("tomorrow", retry_after_seconds=86_400)] * 9)
    with pytest.raises(Unavailable, match="tomorrow"):
        await retry_until(time.monotonic() + 0.05, attempt)
    assert 1 <= len(given) <= 3
