from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.rollout.publication.receiver import Receiver
from tests.support.fakes.fake_fleet import FakeFleet, fake_fleet


@pytest.fixture
async def fakes() -> AsyncIterator[FakeFleet]:
    async with fake_fleet() as fleet:
        yield fleet


@pytest.fixture
def receiver(fakes: FakeFleet) -> Receiver:
    return Receiver(fakes.fleet)
