"""A sample's way through buffer and reward service over IPv6, and over either family at one port."""

from __future__ import annotations

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.client.reward import RewardClient
from headrace.hooks import section_args
from headrace.job.schema.services import RewardSection
from headrace.launch.health import is_serving
from headrace.rpc.net import Address
from headrace.rpc.server import Listen
from headrace.score import Score, ScoreItem
from services.buffer.store.memory import MemoryStore
from services.reward.server import RewardServer
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer
from tests.support.processes.ipv6 import needs_both_families

STREAM = pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=1)


@needs_both_families
@pytest.mark.parametrize("listens", ["[::1]:0", "[::]:0"])
async def test_a_group_is_leased_scored_and_put(listens: str) -> None:
    section = RewardSection(reward_workers=1, rm_type="exact_match")
    reward = await RewardServer.start(section, section_args(section), Listen(listens, insecure=True))
    hosts = ["::1"] if "::1" in listens else ["::1", "127.0.0.1"]
    try:
        async with served_buffer(MemoryStore(), address=listens, insecure=True) as (_, server):
            for number, host in enumerate(hosts):
                at = str(Address(host, Address.parse(server.address).port))
                async with BufferClient(at) as buffer, RewardClient(str(Address(host, _port(reward)))) as scorer:
                    await buffer.create_stream(STREAM)
                    await buffer.submit_prompts("train", text_prompts(f"a{number}"))
                    (lease,) = (await buffer.lease_groups("train", "p", 1)).leases
                    (score,) = await scorer.score([ScoreItem("0", "3 + 4 =", "7", label="7")], deadline_seconds=120)
                    (result,) = await buffer.put_groups([complete_put(lease)])
                assert await is_serving(at)
                assert isinstance(score, Score)
                assert score.value == 1.0
                assert result.state == pb.GROUP_STATE_READY
    finally:
        await reward.stop(1)


def _port(reward: RewardServer) -> int:
    return Address.parse(reward.rpc.address).port
