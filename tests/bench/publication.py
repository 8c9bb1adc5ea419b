"""`make bench`: a publication of weights against a raw broadcast of the same bytes, in one run, as ratios.

The baseline is gloo between two processes and nothing else. A publication is what the trainer does to one real SGLang
engine: pause, bucket by bucket, load into the model, flush, checksums of every tensor on both sides, flip, continue.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
import uuid
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper
from transformers import AutoModelForCausalLM

from headrace.job.schema.job import Job
from headrace.wire.tensor_spec import TensorSpec
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.machine import detect_machine
from services.rollout.engine.router import Router
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.rollout.service import sglang_factory
from services.trainer.weights.buckets import cut
from services.trainer.weights.engine_layout import EngineChecksums, flat_bytes
from services.trainer.weights.weight_group import WeightGroup
from tests.support.models.tiny_model import make_tiny_qwen3

ROUNDS = 7
BUCKET_BYTES = 16 << 20


def receive_raw(name: str, port: int, sizes: list[int], ready: Queue[int]) -> None:
    """The other end of the baseline."""
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=60))
    group, _ = _new_process_group_helper(
        2, 1, [], Backend("gloo"), dist.PrefixStore(name, store), group_name=name, backend_options=None,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    for _ in range(ROUNDS):
        for size in sizes:
            group.broadcast([torch.empty(size, dtype=torch.uint8)], dist.BroadcastOptions()).wait()
        ready.put(1)


def raw_seconds(buckets: list[torch.Tensor]) -> list[float]:
    """Each round: every bucket to one other process, which says when it has them."""
    group = WeightGroup(f"raw-{uuid.uuid4().hex[:8]}", "127.0.0.1", "gloo", 60.0)
    spawn = multiprocessing.get_context("spawn")
    ready: Queue[int] = spawn.Queue()
    peer = spawn.Process(target=receive_raw, args=(group.name, group.port, [b.numel() for b in buckets], ready))
    peer.start()
    group.join(2, lambda: False)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for bucket in buckets:
            group.broadcast(bucket, lambda: False)
        ready.get(timeout=60)
        seconds.append(time.perf_counter() - started)
    peer.join(10)
    group.drop()
    return seconds


async def published_seconds(receiver: Receiver, weights: dict[str, torch.Tensor]) -> list[float]:
    """Each round: a whole transaction, checksums included, as the trainer's publisher runs it."""
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    cuts = cut(specs, BUCKET_BYTES)
    group = WeightGroup(f"bench-{uuid.uuid4().hex[:8]}", "127.0.0.1", "gloo", 60.0)
    seconds = []
    for version in range(1, ROUNDS + 1):
        started = time.perf_counter()
        plan = Plan(
            publication_id=f"bench-{version}",
            policy_version=version,
            buckets=dict(enumerate(cuts)),
            groups=(GroupPlan(group.name, "127.0.0.1", group.port, tuple(range(len(cuts))), joined=group.joined),),
            backend="gloo",
            pause_mode="in_place",
            deadline_seconds=120.0,
            epoch=1,
        )
        begun = await receiver.begin(plan)
        sums = EngineChecksums()

        def send(world_size: int = begun.world_size, sums: EngineChecksums = sums) -> None:
            if not group.joined:
                group.join(world_size, lambda: False)
            for bucket in cuts:
                tensors = [(spec.name, weights[spec.name]) for spec in bucket]
                sums.update(tensors)
                group.broadcast(torch.cat([flat_bytes(t) for _, t in tensors]), lambda: False)

        sending = asyncio.create_task(asyncio.to_thread(send))
        for number in range(len(cuts)):
            await receiver.receive(plan.publication_id, number)
        await sending
        await receiver.commit(plan.publication_id, sums.result())
        seconds.append(time.perf_counter() - started)
    group.drop()
    return seconds


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_tiny_qwen3(Path(folder) / "model", num_layers=48)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        weights = {n: p.detach() for n, p in model.named_parameters() if n != "lm_head.weight"}
        job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}})
        router = Router("cache_aware", Path(folder) / "router.log", request_seconds=60)
        fleet = Fleet(
            1, 1, sglang_factory(job, await detect_machine(), Path(folder)), router, FleetTiming(start_seconds=600)
        )
        print("starting an engine …", flush=True)
        await asyncio.gather(router.start(), fleet.start())
        try:
            published = await published_seconds(Receiver(fleet), weights)
        finally:
            await asyncio.gather(fleet.stop(), router.stop())
        flat = torch.cat([flat_bytes(t) for t in weights.values()])
        raw = raw_seconds(list(flat.split(BUCKET_BYTES)))
    ours, baseline = statistics.median(published[1:]), statistics.median(raw[1:])
    print(f"{len(weights)} tensors, {flat.numel() / 1e6:.0f} MB, one engine, median of {ROUNDS - 1}")
    print(f"raw gloo broadcast  {baseline:8.3f} s   1.0×")
    print(f"publication         {ours:8.3f} s   {ours / baseline:.1f}×")


if __name__ == "__main__":
    asyncio.run(main())
