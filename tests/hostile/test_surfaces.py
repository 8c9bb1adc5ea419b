"""All four services at once under odd calls, while health is asked: no INTERNAL, no traceback, nobody waits.

Odd calls are those that gRPC takes and no client of headrace makes: reset at once, without a request, with several,
packed. HEADRACE_HOSTILE says how many; without it some are made to the services of `test_fuzz.py`, each in its turn.
HEADRACE_HOSTILE_SEED asks for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from tests.hostile.servers.servers import (
    ServerProcess,
    buffer_process,
    reward_process,
    rollout_process,
    tracebacks,
    trainer_process,
)
from tests.hostile.wire import BUFFER, REWARD, ROLLOUT, TRAINER
from tests.support.processes.health_probe import HealthProbe

NUM_ATTACKS = int(os.environ.get("HEADRACE_HOSTILE", "0"))
SEED = os.environ.get("HEADRACE_HOSTILE_SEED", "7")

pytestmark = [
    pytest.mark.timeout(600 + NUM_ATTACKS // 20),
    pytest.mark.skipif(not NUM_ATTACKS, reason="HEADRACE_HOSTILE says how many attacks; test_fuzz.py has some"),
]

QUICK = {BUFFER: "GetStats", ROLLOUT: "GetFleet", REWARD: "ListScorers", TRAINER: "GetStatus"}
"""An RPC of each service that answers at once."""
FLOOD = 100
_HEALTH = "/grpc.health.v1.Health/Check"
_CALLS_OF_A_CHANNEL = 100
_SECONDS = 60.0
_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


async def require_no_bug(server: ServerProcess, service: ServiceDescriptor, count: int, seed: str) -> None:
    """Makes so many odd calls, floods as one. None is answered INTERNAL or UNKNOWN, nor counted as such."""
    chance = random.Random(f"{service.name} {seed}")
    path, codes = f"/{service.full_name}/{QUICK[service]}", Counter[grpc.StatusCode]()
    for start in range(0, count, _CALLS_OF_A_CHANNEL):
        async with grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            calls = [chance.choice(_ODD) for _ in range(min(_CALLS_OF_A_CHANNEL, count - start))]
            codes.update(await asyncio.gather(*(_code(odd(channel, chance, path)) for odd in calls)))
    print(f"\n{service.name}: seed {seed}, " + ", ".join(f"{code.name} {n}" for code, n in codes.items()))
    assert not codes.keys() & set(_BUGS), codes
    assert not tracebacks(server.log), tracebacks(server.log)[0]
    counted = await asyncio.to_thread(_bugs_counted, server)
    assert not counted, "callers that had left heard nothing of it"


async def _code(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _reset_flood(channel: Any, chance: random.Random, path: str) -> None:
    """CVE-2023-44487, of one method or of two: each has a queue of its own."""
    paths = chance.choice([[path], [path, _HEALTH]])
    calls = [channel.unary_unary(paths[n % len(paths)])(b"", timeout=_SECONDS) for n in range(FLOOD)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def _messages(channel: Any, path: str, messages: Sequence[bytes], *, ends: bool = True) -> None:
    async def sent() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if not ends:
            await asyncio.get_running_loop().create_future()

    await channel.stream_unary(path)(sent(), timeout=_SECONDS if ends else 0.05)


async def _no_request(channel: Any, chance: random.Random, path: str) -> None:
    await _messages(channel, path, [])


async def _several_requests(channel: Any, chance: random.Random, path: str) -> None:
    await _messages(channel, path, [b""] * chance.randint(2, 50))


async def _request_that_never_comes(channel: Any, chance: random.Random, path: str) -> None:
    await _messages(channel, path, [], ends=False)


async def _noise(channel: Any, chance: random.Random, path: str) -> None:
    await channel.unary_unary(path)(chance.randbytes(chance.randrange(300)), timeout=_SECONDS)


async def _packed(channel: Any, chance: random.Random, path: str) -> None:
    await channel.unary_unary(path)(bytes(4 << 20), timeout=_SECONDS, compression=grpc.Compression.Gzip)


async def _metadata(channel: Any, chance: random.Random, path: str) -> None:
    metadata = chance.choice(
        [
            [("x", "y" * chance.randint(8_000, 30_000))],
            [(f"x-{n}", "y") for n in range(500)],
            [("authorization", "Bearer " + "x" * 4_000)],
            [("grpc-status-details-bin", chance.randbytes(64))],
            [("x-bin", b"\xff" * 64)],
        ]
    )
    await channel.unary_unary(path)(b"", timeout=_SECONDS, metadata=metadata)


async def _unknown_method(channel: Any, chance: random.Random, path: str) -> None:
    await channel.unary_unary(chance.choice([f"{path}x", "/no/Such", "/a/b/c"]))(b"", timeout=_SECONDS)


async def _unread_watch(channel: Any, chance: random.Random, path: str) -> None:
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=_SECONDS)
    await asyncio.sleep(0)
    call.cancel()


_ODD: Sequence[Callable[[Any, random.Random, str], Awaitable[None]]] = (
    *(_reset_flood, _no_request, _several_requests, _request_that_never_comes, _noise, _packed, _metadata),
    *(_unknown_method, _unread_watch),
)


def _bugs_counted(server: ServerProcess) -> Sequence[str]:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=_SECONDS) as reply:  # ours
        text = reply.read().decode()
    assert "headrace_rpc_calls" in text
    return re.findall(r'^headrace_rpc_calls_total\{code="(?:INTERNAL|UNKNOWN)".*$', text, re.MULTILINE)


async def test_odd_calls_end_nothing_and_hold_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(200)))
    job = {
        "data": {"prompt_data": [str(tmp_path / "prompts.jsonl")]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "buffer": {"max_staleness": 2, "prompt_root": str(tmp_path)},
    }
    buffer, reward, trainer = (
        buffer_process(tmp_path, job),
        reward_process(tmp_path),
        trainer_process(tmp_path, step_seconds=1.0),
    )
    rollout = rollout_process(tmp_path, buffer.address, reward.address)
    services = {buffer: BUFFER, reward: REWARD, rollout: ROLLOUT, trainer: TRAINER}
    try:
        await asyncio.gather(buffer.start(), reward.start(), trainer.start())
        await rollout.start()
        with contextlib.ExitStack() as watching:
            healths = [watching.enter_context(HealthProbe(each.address, lambda pid=each.pid: pid)) for each in services]
            share = NUM_ATTACKS // len(services)
            await asyncio.gather(*(require_no_bug(each, service, share, SEED) for each, service in services.items()))
        assert all(health.num_answers > 0 and health.num_refused == 0 for health in healths)
        assert all(each.is_alive for each in services)
    finally:
        for server in (rollout, trainer, reward, buffer):
            await server.kill()
