from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet


@pytest.fixture
async def fakes() -> AsyncIterator[FakeFleet]:
    async with fake_fleet() as fleet:
        yield fleet
