"""A service that the job gives an address is somebody else's to start: --buffer-address, --rollout-address."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli import runs
from headrace.cli.runs import require_answer
from headrace.errors import ConfigError, Unavailable
from headrace.job.rules.scope import services_here
from headrace.launch.specs import addressed
from headrace.rpc.net import Address, free_port
from headrace.rpc.server import RpcServer
from headrace.run_folder import RunFolder, ServiceEntry


@pytest.mark.parametrize("service", ["buffer", "rollout", "reward"])
def test_a_service_with_an_address_is_not_started(load_with, service: str) -> None:
    started = services_here(load_with(f"--{service}-address", "127.0.0.1:7003"))
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


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_services_without_an_address_are_started_at_service_host_and_keep_their_port_there(
    load_with, tmp_path: Path, host: str
) -> None:
    folder = RunFolder(tmp_path)
    job = load_with("--service-host", host, "--reward-address", "127.0.0.1:7003")
    first = addressed(job, services_here(job), folder).services
    found = (first.buffer_address, first.rollout_address, first.trainer_address)
    places = [Address.parse(each) for each in found if each]
    assert len(places) == len(found)
    assert {place.host for place in places} == {host}
    assert first.reward_address == "127.0.0.1:7003"
    folder.write_services({"buffer": ServiceEntry(str(places[0]), None, 2**22 + 1)})  # of a start that has ended
    assert addressed(job, ["buffer"], folder).services.buffer_address == first.buffer_address
    moved = load_with("--service-host", "127.0.0.3")
    assert str(addressed(moved, ["buffer"], folder).services.buffer_address).startswith("127.0.0.3:")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("192.0.2.77",), "192.0.2.77 is an address that other machines reach: pass --tls-dir"),
        (("192.0.2.77", "--insecure"), "192.0.2.77 is no address of this machine: name one that `ip address` shows"),
        (("0.0.0.0", "--insecure"), "means every interface, and is no address that others can call"),  # noqa: S104
    ],
)
def test_a_service_host_at_which_services_cannot_be_reached_is_refused(
    load_with, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_with("--service-host", *flags)


def test_ranks_on_several_machines_reach_services_at_service_host(load_with) -> None:
    several = ("--actor-num-nodes", "2", "--placement", "slurm")
    with pytest.raises(ConfigError, match="ranks on other machines cannot reach buffer, .* with --service-host"):
        load_with(*several)
    with pytest.raises(ConfigError, match="reach buffer, which is at 127.0.0.1:0"):
        load_with(*several, "--service-host", "127.0.0.1")
