"""The largest put: on the loop gRPC joins the slices that came and makes bytes of them, 1.3 ms a MiB.

Parsing, checking, hashing and storing copy nothing, and what of it is long is done elsewhere.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np

from headrace import limits
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.trajectory import PolicyRange
from services.buffer.store.memory import MemoryStore
from tests.hostile import test_loop_is_free
from tests.hostile.test_loop_is_free import Calls, Watchdog, prompts, put_of
from tests.support.ledgers.buffer_samples import completed_sample
from tests.support.processes.buffer_server import served_buffer

NUM_SAMPLES = 64
watchdog = test_loop_is_free.watchdog


async def test_the_largest_put_is_copied_by_grpc_twice_and_by_nobody_else(watchdog: Watchdog, tmp_path: Path) -> None:
    """One copy joins the slices that came, the other makes bytes of them: the store keeps parts of those."""
    async with served_buffer(MemoryStore(), columns_folder=tmp_path) as (_, server):
        call = Calls(server.address, watchdog)
        data = await largest_put(call)
        tracemalloc.start()
        try:
            (answer,) = await call.send("PutGroups", data)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        call.close()
    assert pb.PutGroupsResponse.FromString(answer).results[0].state == pb.GROUP_STATE_READY
    assert 1.5 < peak_bytes / len(data) < 2.5, "copies"
    assert watchdog.longest["PutGroups"].is_short, watchdog.longest


async def largest_put(call: Calls) -> bytes:
    """As many bytes as a put may have, in samples of many tokens."""
    config = pb.StreamConfig(name="train", n_samples_per_prompt=NUM_SAMPLES, groups_per_step=1)
    await call("CreateStream", pb.CreateStreamRequest(config=config))
    await call("SubmitPrompts", prompts(0, 1))
    request = pb.LeaseGroupsRequest(stream="train", producer_id="p", request_id="r", max_groups=1)
    (lease,) = (await call("LeaseGroups", request)).leases
    length = (limits.MAX_PUT_REQUEST_BYTES // NUM_SAMPLES - 4_096) // 9
    packed = dataclasses.replace(
        completed_sample(lease, 0, 0),
        tokens=np.ones(length + 3, np.int32),
        loss_mask=np.ones(length, np.uint8),
        rollout_log_probs=np.zeros(length, np.float32),
        policy_ranges=[PolicyRange(0, 0, length)],
    ).pack()
    put = put_of(lease)
    for sample in put.samples:
        sample_id, index = sample.envelope.sample_id, sample.envelope.index
        sample.CopyFrom(packed)
        sample.envelope.sample_id, sample.envelope.index = sample_id, index
    data = pb.PutGroupsRequest(groups=[put]).SerializeToString()
    assert 0.95 * limits.MAX_PUT_REQUEST_BYTES < len(data) <= limits.MAX_PUT_REQUEST_BYTES
    return data
