"""`make bench`: publications of weights against a raw broadcast of the same bytes, in one run, as ratios.

The baseline is gloo from one process to as many others as there are engines, and nothing else. A publication is what
the trainer does to real SGLang engines: pause, bucket by bucket, load into the model, flush, continue, checksums of
every tensor on both sides, flip. The standstill is its part from the pause to the last engine that goes on. Rounds of
both take turns, and so do publications through files, on the disk and in shared memory (ipc), whose lines have the
bytes written.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.job.schema.job import Job
from headrace.process.scratch import memory_folder
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.router import Router
from services.rollout.fleet_build import sglang_factory
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan, Plan
from services.trainer.control.senders import WeightSender, WeightWriter
from services.trainer.control.transport import sweep
from services.trainer.durable import remove
from services.trainer.model.policy import Policy
from services.trainer.weights.buckets import MemoryFiles
from services.trainer.weights.engine_layout import flat_bytes
from services.trainer.weights.weight_group import WeightGroup
from tests.support.fakes.same_weights import ALONE, SameWeights, all_ranks
from tests.support.models.tiny_model import make_tiny_qwen3, make_tiny_tokenizer

ROUNDS = 7
RAW_BUCKET_BYTES = 64 << 20
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}


def receive_raw(name: str, port: int, world_size: int, rank: int, sizes: list[int], ready: Queue[int]) -> None:
    """One of the other ends of the baseline."""
    store = dist.TCPStore("127.0.0.1", port, world_size, False, timedelta(seconds=600))
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), dist.PrefixStore(name, store), group_name=GroupName(name),
        backend_options=None, timeout=timedelta(seconds=600),
    )  # fmt: skip
    received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for _ in range(ROUNDS):
        for buffer in received:
            group.broadcast([buffer], dist.BroadcastOptions()).wait()
        ready.put(1)


class RawBroadcast:
    """Every bucket to `num_receivers` processes, which say when they have them."""

    def __init__(self, flat: torch.Tensor, num_receivers: int) -> None:
        self._buckets = list(flat.split(RAW_BUCKET_BYTES))
        self._group = WeightGroup(f"raw-{uuid.uuid4().hex[:8]}", "127.0.0.1", "gloo", 600.0)
        spawn = multiprocessing.get_context("spawn")
        self._ready: Queue[int] = spawn.Queue()
        sizes, world_size = [bucket.numel() for bucket in self._buckets], 1 + num_receivers
        self._receivers = [
            spawn.Process(
                target=receive_raw, args=(self._group.name, self._group.port, world_size, rank, sizes, self._ready)
            )
            for rank in range(1, world_size)
        ]
        for receiver in self._receivers:
            receiver.start()
        self._group.join(world_size, lambda: False)

    def seconds(self) -> float:
        started = time.perf_counter()
        for bucket in self._buckets:
            self._group.broadcast(bucket, lambda: False)
        for _ in self._receivers:
            self._ready.get(timeout=600)
        return time.perf_counter() - started

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.join(10)
        self._group.drop()


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    raw: float
    hashing: float
    whole: float
    standstill: float
    through_files: Mapping[str, tuple[float, float, int]]
    """By transport: the whole, its standstill, and the bytes written."""


async def measured(fleet: Fleet, policy: SameWeights, num_engines: int, roots: Mapping[str, Path]) -> list[Round]:
    """The rounds but the first two, in which groups are joined and memory is allocated."""
    weights = dict(policy.hf_tensors())
    flat = torch.cat([flat_bytes(tensor) for tensor in weights.values()])
    raw = await asyncio.to_thread(RawBroadcast, flat, num_engines)
    publications = Publications(Receiver(fleet), policy)
    through_files = {
        name: FilePublications(Receiver(fleet, root), policy, root, in_memory=name == "ipc")
        for name, root in roots.items()
    }
    rounds = []
    gc.freeze()  # as the services do: else a collection over libraries and weights falls into a round
    for number in range(ROUNDS):
        raw_seconds = await asyncio.to_thread(raw.seconds)
        started = time.perf_counter()
        hashlib.sha256(flat.numpy().data).digest()
        hashing = time.perf_counter() - started
        broadcast = await publications.seconds(3 * number + 1)
        written = {}
        for place, (name, publication) in enumerate(through_files.items()):
            written[name] = await publication.seconds(3 * number + 2 + place)
        rounds.append(Round(raw_seconds, hashing, *broadcast, written))
    publications.close()
    raw.close()
    return rounds[2:]


def make_smollm2(folder: Path) -> Path:
    """A random Llama of its shapes with the tiny tokenizer."""
    LlamaForCausalLM(
        LlamaConfig(
            **SMOLLM2, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).to(torch.float32).save_pretrained(folder)  # fmt: skip
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


async def bench(name: str, checkpoint: Path, num_engines: int, folder: Path) -> None:
    """Prints one row."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = {n: p.detach() for n, p in model.named_parameters() if n != "lm_head.weight"}
    job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}})
    timing = FleetTiming(start_seconds=900)
    router = Router(job.rollout, folder / "router.log", request_seconds=60, timing=timing)
    factory = sglang_factory(job, folder, has_accelerator=await has_accelerator())
    fleet = Fleet(num_engines, 1, factory, router, timing)
    await asyncio.gather(router.start(), fleet.start())
    try:
        with all_ranks():
            policy = SameWeights(weights, checkpoint)
            roots = {"disk": folder / "weights", "ipc": memory_folder(folder)}
            rounds = await measured(fleet, policy, num_engines, roots)
    finally:
        await asyncio.gather(fleet.stop(), router.stop())
        remove(memory_folder(folder))

    def median(read: Any) -> float:
        return statistics.median(map(read, rounds))

    print(
        f"{name:>8} {num_engines:>8} {median(lambda r: r.raw):>7.3f} s {median(lambda r: r.hashing):>7.3f} s "
        f"{median(lambda r: r.standstill):>7.3f} s {median(lambda r: r.standstill / r.raw):>6.2f}× "
        f"{median(lambda r: r.whole):>7.3f} s {median(lambda r: r.whole / r.raw):>6.2f}× "
        f"{median(lambda r: r.whole / (r.raw + r.hashing)):>6.2f}×",
        flush=True,
    )
    for way in roots:
        print_files_row(way, num_engines, rounds)


def print_files_row(way: str, num_engines: int, rounds: Sequence[Round]) -> None:
    """Of publications through files."""

    def median(read: Callable[[Round, tuple[float, float, int]], float]) -> float:
        return statistics.median(read(each, each.through_files[way]) for each in rounds)

    print(
        f"{'by ' + way:>8} {num_engines:>8} {median(lambda _, found: found[2]) / 1e6:>7.1f} MB {'written':>8} "
        f"{median(lambda _, found: found[1]):>7.3f} s {median(lambda r, found: found[1] / r.raw):>6.2f}× "
        f"{median(lambda _, found: found[0]):>7.3f} s {median(lambda r, found: found[0] / r.raw):>6.2f}× "
        f"{median(lambda r, found: found[0] / (r.raw + r.hashing)):>6.2f}×",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["7MB", "538MB"], choices=["7MB", "538MB"])
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print("  Seconds and ratios are medians: to the broadcast; last, to the broadcast and one pass of SHA-256.")
        print(f"{'weights':>8} {'engines':>8} {'raw gloo':>9} {'SHA-256':>9} {'standstill':>17} {'whole':>25}")
        for size in given.sizes:
            folder = Path(name) / size
            checkpoint = make_tiny_qwen3(folder, num_layers=48) if size == "7MB" else make_smollm2(folder)
            for num_engines in given.engines:
                await bench(size, checkpoint, num_engines, Path(name))


class Publications:
    """Whole transactions, checksums included, as the trainer's publisher runs them."""

    def __init__(self, receiver: Receiver, policy: SameWeights) -> None:
        self._receiver = receiver
        self._sender = WeightSender(
            cast(Policy, policy), ALONE, lambda _: False,
            host="127.0.0.1", bucket_bytes=Job.model_fields["publish"].get_default(call_default_factory=True)
            .update_weight_buffer_size, timeout_seconds=600.0,
        )  # fmt: skip
        described = self._sender.describe()
        assert described is not None
        self.buckets = described.buckets
        self._version = 0

    async def seconds(self, version: int) -> tuple[float, float]:
        """The whole, and its standstill."""
        self._version = version
        started = time.perf_counter()
        group = self._sender.open(0)
        assert group is not None
        plan = Plan(
            publication_id=f"bench-{self._version}",
            policy_version=self._version,
            buckets=dict(enumerate(self.buckets)),
            groups=(GroupPlan(group.name, group.host, group.port, tuple(range(len(self.buckets))), group.joined),),
            backend="gloo",
            pause_mode="in_place",
            deadline_seconds=600.0,
            epoch=1,
        )
        begun = await self._receiver.begin(plan)
        sending = asyncio.create_task(asyncio.to_thread(self._sender.send, plan.publication_id, {0: begun.world_size}))
        for number in range(len(self.buckets)):
            await self._receiver.receive(plan.publication_id, number)
        sent = await sending
        assert sent is not None
        assert sent.error is None, sent.error
        committed = await self._receiver.commit(plan.publication_id, sent.checksums)
        return time.perf_counter() - started, committed.paused_seconds

    def close(self) -> None:
        self._sender.drop([0])


class FilePublications:
    """The same through files: written, loaded, verified; the version before is deleted after that.

    With `in_memory` they lie in shared memory, else they are synced to the disk.
    """

    def __init__(self, receiver: Receiver, policy: SameWeights, root: Path, *, in_memory: bool) -> None:
        self._receiver = receiver
        self._specs = policy.hf_tensor_specs()
        self._root = root
        self._in_memory = in_memory
        self._writer = WeightWriter(
            cast(Policy, policy),
            ALONE,
            lambda _: False,
            root=root,
            file_bytes=512 << 20,
            memory=MemoryFiles() if in_memory else None,
        )

    async def seconds(self, version: int) -> tuple[float, float, int]:
        """The whole, its standstill, and the bytes in the folder."""
        started, name = time.perf_counter(), f"e1-v{version}-0a1b2c3d"
        sent = await asyncio.to_thread(self._writer.send, name, {})
        assert sent is not None
        assert sent.error is None, sent.error
        plan = Plan(
            publication_id=name,
            policy_version=version,
            buckets={0: self._specs},
            groups=(),
            backend="gloo",
            pause_mode="in_place",
            deadline_seconds=600.0,
            epoch=1,
            folder=self._root / name,
        )
        await self._receiver.begin(plan)
        await self._receiver.receive(name, 0)
        if self._in_memory:
            sent = await asyncio.to_thread(self._writer.send, name, {}, kept=True)
            assert sent is not None
        committed = await self._receiver.commit(name, sent.checksums)
        seconds = time.perf_counter() - started
        num_bytes = sum(file.stat().st_size for file in (self._root / name).iterdir())
        sweep(self._root, set(), 1)
        return seconds, committed.paused_seconds, num_bytes


if __name__ == "__main__":
    asyncio.run(main())
