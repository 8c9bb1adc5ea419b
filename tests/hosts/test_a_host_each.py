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


LOOK_AND_CHANGE = """
import asyncio, os, sys
from headrace.client.buffer import BufferClient
from headrace.errors import HeadraceError
async def main(token):
    os.environ["HEADRACE_TOKEN"] = token
    async with BufferClient(sys.argv[1]) as buffer:
        for call in (buffer.stats("train"), buffer.rewind("train", 0)):
            try:
                await call
                print("OK")
            except HeadraceError as error:
                print(error.reason)
for token in sys.argv[2:]:
    asyncio.run(main(token))
"""
"""What the buffer says to a look and to a change, with each of the tokens."""


@long_form
async def test_two_ranks_on_each_of_two_hosts_train_over_ipv6_and_callers_have_the_roles_of_their_tokens(
    tmp_path: Path,
) -> None:
    with network((*NAMES, "second"), ipv6=True) as hosts:
        flags = ("--num-rollout", "4", "--tensor-model-parallel-size", "2")
        model = make_tiny_qwen3(tmp_path / "model")
        run = RunOnHosts(hosts, tmp_path, model, *flags, trainers=("trainer", "second"), ranks_per_host=2)
        async with run.started():
            await run.finished()
            asked = (sys.executable, "-c", LOOK_AND_CHANGE, run.at("buffer"), run.guest_token, "")
            said = await run.guest_said(*asked)
            assert CLEAN in await run.audited()
    assert all(row["grad_norm"] > 0 for row in run.metrics())
    assert said.split()[-4:] == ["OK", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNAUTHENTICATED"]


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
