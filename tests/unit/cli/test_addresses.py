"""A service that the job gives an address is somebody else's to start: --buffer-address, --rollout-address."""

from __future__ import annotations

import pytest

from headrace.cli import runs
from headrace.cli.runs import require_answer
from headrace.errors import Unavailable
from headrace.launch.specs import without_address
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer


@pytest.mark.parametrize("service", ["buffer", "rollout", "reward"])
def test_a_service_with_an_address_is_not_started(load_with, service: str) -> None:
    started = without_address(load_with(f"--{service}-address", "127.0.0.1:7003"))
    assert started == [name for name in ("buffer", "reward", "rollout", "trainer") if name != service]


async def test_a_command_needs_all_shards_of_a_buffer_and_one_of_several_rollout_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "_ANSWER_SECONDS", 1.0)
    server, gone = RpcServer("any", "127.0.0.1:0", []), f"127.0.0.1:{free_port()}"
    await server.start()
    await require_answer(f"{gone},{server.address}", "rollout")
    await require_answer(server.address, "buffer")
    for addresses, service in ((f"{server.address},{gone}", "buffer"), (f"{gone},{gone}", "rollout")):
        with pytest.raises(Unavailable, match=f"no {service} service answers at {gone} within 1 s"):
            await require_answer(addresses, service)
    await server.stop(0.0)
