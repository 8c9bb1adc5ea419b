"""A service that the job gives an address is somebody else's to start: --buffer-address, --rollout-address."""

from __future__ import annotations

import pytest

from headrace.launch.specs import without_address


@pytest.mark.parametrize("service", ["buffer", "rollout", "reward"])
def test_a_service_with_an_address_is_not_started(load_with, service: str) -> None:
    started = without_address(load_with(f"--{service}-address", "127.0.0.1:7003"))
    assert started == [name for name in ("buffer", "reward", "rollout", "trainer") if name != service]
