"""Services on hosts of their own, with certificates and tokens: several trainers, IPv6, slow lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.hosts.hosts import NAMES, network
from tests.support.hosts.run_on_hosts import RunOnHosts
from tests.support.models.tiny_model import make_tiny_qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.timeout(900)]
long_form = pytest.mark.skipif("HEADRACE_HOSTS" not in os.environ, reason="long: make chaos sets HEADRACE_HOSTS")

CLEAN = "lost, doubled, unaccounted: 0 0 0"


@long_form
async def test_two_ranks_on_each_of_two_hosts_train_together(tmp_path: Path) -> None:
    with network((*NAMES, "second")) as hosts:
        run = RunOnHosts(
            hosts,
            tmp_path,
            make_tiny_qwen3(tmp_path / "model"),
            "--num-rollout",
            "4",
            *("--tensor-model-parallel-size", "2"),
            trainers=("trainer", "second"),
            ranks_per_host=2,
        )
        async with run.started():
            await run.finished()
            audited = await run.audited()
    assert CLEAN in audited
    assert all(row["grad_norm"] > 0 for row in run.metrics())


@long_form
async def test_a_run_with_ranks_on_two_hosts_trains_over_ipv6(tmp_path: Path) -> None:
    with network((*NAMES, "second"), ipv6=True) as hosts:
        model = make_tiny_qwen3(tmp_path / "model")
        run = RunOnHosts(hosts, tmp_path, model, "--num-rollout", "4", trainers=("trainer", "second"))
        async with run.started():
            await run.finished()
            assert CLEAN in await run.audited()


@long_form
@pytest.mark.parametrize("bits_per_second", [None, 10e6])
async def test_a_run_trains_over_a_line_of_50_ms_that_loses_2_frames_of_100(
    tmp_path: Path, bits_per_second: float | None
) -> None:
    with network() as hosts:
        hosts.switch.disturb(delay_seconds=0.05, loss=0.02, bits_per_second=bits_per_second)
        run = RunOnHosts(hosts, tmp_path, make_tiny_qwen3(tmp_path / "model"), "--num-rollout", "8")
        async with run.started():
            await run.finished()
            said = await run.audited()
    assert run.last_step() == 8
    assert CLEAN in said


@pytest.mark.parametrize("ipv6", [False, True])
async def test_engines_meet_the_trainer_at_the_interface_of_their_services_address(ipv6: bool) -> None:
    program = (
        "import sys; from headrace.rpc.net import Address as A; from services.rollout.engine.arguments import "
        "listening_for_weights as f; a = A(sys.argv[1], 7); "
        "print(f(a, {}), f(A('127.0.0.1', 7), {}), f(a, {'GLOO_SOCKET_IFNAME': 'ib0'}))"
    )
    with network(["rollout"], ipv6=ipv6) as hosts:
        rollout = hosts.hosts["rollout"]
        said = await rollout.said(sys.executable, "-c", program, rollout.address)
    assert said.splitlines()[-1] == "{'GLOO_SOCKET_IFNAME': 'eth0'} {} {}"


async def test_a_name_that_means_127_0_1_1_on_its_own_host_is_refused_where_others_would_be_told_it() -> None:
    listens = (
        "import asyncio; from headrace.rpc.server import RpcServer; "
        "asyncio.run(RpcServer('buffer', 'buffer:7001', [], insecure=True).start())"
    )
    with network(["buffer"]) as hosts:
        refused = await hosts.hosts["buffer"].refused(sys.executable, "-c", listens)
    assert "buffer means 127.0.1.1 on this machine, where no other reaches it: pass --listen-host 0.0.0.0" in refused
