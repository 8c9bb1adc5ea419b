"""What holds for every test: none assumes a calm machine, none logs to where another one did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A service's `main` configures the whole process's log, on a stream that ends with the test that called it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
