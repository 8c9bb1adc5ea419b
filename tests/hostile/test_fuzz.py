"""Every RPC of all four services under generated calls: no bug reaches a caller or a log, and whoever asks is answered.

600 calls in all; HEADRACE_FUZZ asks for more, HEADRACE_FUZZ_SEED for others. A finding prints its seed and request.
Before them some calls that no client of headrace makes (`test_surfaces.py` has more).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from headrace.api.buffer.v1 import buffer_pb2 as pb
from tests.hostile.fuzz.campaign import Campaign, by_kind
from tests.hostile.servers.servers import (
    ServerProcess,
    buffer_process,
    reward_process,
    rollout_process,
    tracebacks,
    trainer_process,
)
from tests.hostile.test_surfaces import require_no_bug
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER, Refused, Wire
from tests.support.processes.health_probe import HealthProbe

NUM_CALLS = int(os.environ.get("HEADRACE_FUZZ", "600"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "10"))
NUM_ODD_CALLS = 100
SHARES = {BUFFER: 0.6, ROLLOUT: 0.18, REWARD: 0.1, TRAINER: 0.12}
NUM_HANDS = 8 if NUM_CALLS < 10_000 else 32
MEMORY_FACTOR = 1.1
MEMORY_SLACK_BYTES = 96 << 20
"""What a ledger may hold of the calls that it accepted, and an allocator of what it gave back."""
SETTLING_SECONDS = 5.0

pytestmark = pytest.mark.timeout(600 + NUM_CALLS // 5)


_ENDED_OR_READY = (
    pb.GROUP_STATE_READY,
    pb.GROUP_STATE_CONSUMED,
    pb.GROUP_STATE_COMMITTED,
    pb.GROUP_STATE_DROPPED,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(200)))
    os.mkfifo(tmp_path / "fifo.jsonl")
    return tmp_path


def _buffer(folder: Path) -> ServerProcess:
    return buffer_process(
        folder,
        {
            "data": {"prompt_data": [str(folder / "prompts.jsonl")]},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
            "buffer": {"max_staleness": 2, "prompt_root": str(folder)},
        },
    )


@asynccontextmanager
async def _running(*servers: ServerProcess) -> AsyncIterator[None]:
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in reversed(servers):
            await server.kill()


async def _attack(server: ServerProcess, service: ServiceDescriptor, folder: Path, *ends: str) -> None:
    """Several hands at once, each with its own seed; then everything that holds for every service is checked."""
    await require_no_bug(server, service, NUM_ODD_CALLS, str(SEED))
    share = round(NUM_CALLS * SHARES[service] / NUM_HANDS / 2)
    started = time.monotonic()
    async with Wire(server.address, service) as wire:
        hands = [Campaign(wire, service, f"{SEED}.{i}", folder, frozenset(ends)) for i in range(NUM_HANDS)]
        with HealthProbe(server.address, lambda: server.pid) as health:
            await asyncio.gather(*(hand.run(share) for hand in hands))
            before = server.rss_bytes
            await asyncio.gather(*(hand.run(share) for hand in hands))
            after = await server.settled_rss(before, SETTLING_SECONDS)
    counts = sum((hand.counts for hand in hands), Counter[tuple[str, str]]())
    findings = [finding for hand in hands for finding in hand.findings]
    print(f"\n{service.name}: seed {SEED}, {counts.total()} calls in {time.monotonic() - started:.0f} s")
    print(f"  health {health.worst_seconds:.3f} s at worst, {health.worst_busy_seconds:.3f} s of it computing")
    print(f"  memory {before >> 20} MiB half-way, {after >> 20} MiB at the end")
    print("  " + ", ".join(f"{method} {code} {n}" for (method, code), n in sorted(counts.items())))
    assert not findings, f"{len(findings)} findings, by kind:\n" + "\n".join(by_kind(findings))
    assert not tracebacks(server.log), "\n".join(tracebacks(server.log)[:5])
    assert server.is_alive, server.log[-3000:]
    assert health.num_answers > 0
    assert health.num_refused == 0, "each answer came within the probe's deadline"
    assert after < before * MEMORY_FACTOR + MEMORY_SLACK_BYTES


async def test_the_buffer_answers_every_call_and_what_it_took_can_be_read(folder: Path) -> None:
    server = _buffer(folder)
    async with _running(server):
        await _attack(server, BUFFER, folder)
        async with Wire(server.address, BUFFER) as wire:
            told = await _everything_readable(wire)
        await server.kill()
        await server.start()
        async with Wire(server.address, BUFFER) as wire:
            assert await _everything_readable(wire) == told
    assert not tracebacks(server.log)


async def test_the_reward_service_answers_every_call(folder: Path) -> None:
    server = reward_process(folder)
    async with _running(server):
        await _attack(server, REWARD, folder)


async def test_the_rollout_service_answers_every_call_and_goes_on_producing(folder: Path) -> None:
    buffer, reward = _buffer(folder), reward_process(folder)
    server = rollout_process(folder, buffer.address, reward.address)
    async with _running(buffer, reward, server):
        await _attack(server, ROLLOUT, folder)


async def test_the_trainer_answers_every_call_and_trains_on(folder: Path) -> None:
    server = trainer_process(folder)
    async with _running(server):
        await _attack(server, TRAINER, folder, "Stop")


async def _everything_readable(wire: Wire) -> list[bytes]:
    """Configs, positions and groups that no lease can end, as bytes; the history is there up to its last position."""
    configs = (await wire.ask("ListStreams", pb.ListStreamsRequest())).streams
    stats = await wire.ask("GetStats", pb.GetStatsRequest())
    assert [s.stream for s in stats.streams] == [c.name for c in configs]
    found = [config.SerializeToString(deterministic=True) for config in configs]
    found += [f"{s.stream} {s.epoch} {s.step} {s.committed_step} {s.policy_version}".encode() for s in stats.streams]
    for config in configs:
        token = ""
        while True:
            request = pb.ListGroupsRequest(stream=config.name, page_size=1000, page_token=token)
            page = await wire.ask("ListGroups", request)
            found += [g.SerializeToString(deterministic=True) for g in page.groups if g.state in _ENDED_OR_READY]
            token = page.next_page_token
            if not token:
                break
            await _fetch(wire, config.name, page)
    await _history(wire, stats.position)
    return found


async def _fetch(wire: Wire, stream: str, page: pb.ListGroupsResponse) -> None:
    states = (pb.GROUP_STATE_READY, pb.GROUP_STATE_CONSUMED)
    ids = [sample.sample_id for group in page.groups if group.state in states for sample in group.samples]
    if ids:
        await wire.ask_all("FetchSamples", pb.FetchSamplesRequest(stream=stream, sample_ids=ids))


async def _history(wire: Wire, end: int) -> None:
    """A watch brings all positions up to the end without a gap."""
    method, position = BUFFER.methods_by_name["Watch"], 0
    while position < end:
        request = pb.WatchRequest(from_position=position + 1).SerializeToString()
        reply = await wire.send(method, request, seconds=30, most_messages=1)
        for message in reply.messages:
            for event in message.events:
                assert event.position == position + 1
                position = event.position
        if not reply.messages:
            raise Refused("Watch", reply)
