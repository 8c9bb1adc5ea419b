"""A refusal as programs and people depend on it: its class, its reason, and the value that was wrong.

The rest of the message is prose, which may be written better without a test that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from headrace.errors import HeadraceError

Error = TypeVar("Error", bound=HeadraceError)


@contextmanager
def refused(kind: type[Error], *values: object, reason: str | None = None) -> Iterator[pytest.ExceptionInfo[Error]]:
    """The block raises a `kind` whose message names each value; its reason is the class's own unless one is given."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.reason == (reason or kind("").reason), error
    missing = [str(value) for value in values if str(value) not in error.message]
    assert not missing, f"{error.message!r} does not name {missing}"
