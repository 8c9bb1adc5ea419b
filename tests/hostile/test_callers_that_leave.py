"""Callers whose deadline ends while they are answered: nobody else notices, and no log has a traceback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from tests.hostile.servers.servers import buffer_process, tracebacks
from tests.hostile.wire import BUFFER, Wire

NUM_CALLERS = 16
CALLS_EACH = 150
DEADLINES = (0.001, 0.002, 0.005, 0.01, 0.02)


async def test_calls_that_end_in_the_middle_leave_nothing_behind(tmp_path: Path) -> None:
    server = buffer_process(tmp_path, {"rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}})
    await server.start()
    requests: tuple[Message, ...] = (
        pb.LeaseGroupsRequest(stream="train", producer_id="p", request_id="r", max_groups=1, wait_seconds=5),
        pb.LeaseBatchRequest(stream="train", epoch=5, wait_seconds=5),
        pb.GetStatsRequest(),
        pb.WatchRequest(stream="nowhere"),
        pb.BackupRequest(),
    )

    async def leave_often(wire: Wire, number: int) -> None:
        chance = Random(number)
        for _ in range(CALLS_EACH):
            request = chance.choice(requests)
            method = BUFFER.methods_by_name[type(request).__name__.removesuffix("Request")]
            await wire.send(method, request.SerializeToString(), seconds=chance.choice(DEADLINES))

    try:
        async with Wire(server.address, BUFFER) as wire, asyncio.TaskGroup() as callers:
            for number in range(NUM_CALLERS):
                callers.create_task(leave_often(wire, number))
        async with Wire(server.address, BUFFER) as wire:
            assert (await wire.ask("GetStats", pb.GetStatsRequest())).streams
    finally:
        await server.kill()
    assert not tracebacks(server.log), tracebacks(server.log)[0]
