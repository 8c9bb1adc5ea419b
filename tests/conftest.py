"""For every test: none assumes a calm machine, none logs to where another one did, none leaves a process running.

And no job reads a switch of the tests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.processes.leftovers import (
    pytest_addoption,
    pytest_configure,
    pytest_sessionfinish,
    pytest_terminal_summary,
)

__all__ = ["pytest_addoption", "pytest_configure", "pytest_sessionfinish", "pytest_terminal_summary"]

_TESTS = Path(__file__).parent
_LONG = ("e2e", "chaos", "hosts", "hostile", "clusters", "upgrade", "gpu", "images")

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

_SWITCHES = [name for name in os.environ if name.startswith("HEADRACE_")]
"""Long forms and their sizes, which modules of tests read when they are imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, those that compute among those that wait; files of many short tests fill the end."""
    items.sort(key=lambda item: (not _is_long(item), _shuffled(item)))


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None or item.path.relative_to(_TESTS).parts[0] in _LONG


def _shuffled(item: pytest.Item) -> bytes:
    """The same for the tests of a file, and for every run."""
    return hashlib.sha256(str(item.path.relative_to(_TESTS)).encode()).digest()


@pytest.fixture(autouse=True, scope="session")
def _no_switches() -> Iterator[None]:
    """A job takes every HEADRACE_ variable for one of its options, and refuses those that it does not know."""
    with pytest.MonkeyPatch.context() as environment:
        for name in _SWITCHES:
            environment.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A service's `main` configures the whole process's log, on a stream that ends with the test that called it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
