"""What holds for every test: none assumes a calm machine, none logs to where another one did, no job reads a switch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

_SWITCHES = [name for name in os.environ if name.startswith("HEADRACE_")]
"""Long forms and their sizes, which modules of tests read when they are imported."""


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
