"""The fake engine does what headrace counts on in SGLang; tests/e2e/test_engine.py holds SGLang to the same checks."""

from __future__ import annotations

import pytest

from tests.support.engines.contract import CONTRACT, EngineUnderTest
from tests.support.fakes.fake_fleet import FakeFleet


@pytest.mark.parametrize("promise", CONTRACT)
async def test_the_fake_engine_keeps_the_contract(fakes: FakeFleet, promise: str) -> None:
    fakes.fake(0).weights |= {"model.layers.0.norm.weight": "zero", "model.norm.weight": "last"}
    await CONTRACT[promise](EngineUnderTest(fakes.fleet.engines[0], fakes.fleet.weights))
