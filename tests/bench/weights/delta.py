"""`python -m tests.bench.weights.delta CHECKPOINT`: publications of what changed against the whole, as ratios.

The weights are the checkpoint's in bfloat16, as engines on GPUs get them, and a real SGLang engine takes them. Between
two publications each weight moves in float32 by some half of the learning rate, and changes its direction as slowly as
Adam's momentum does. So many values change then as in a run: the sums of `headrace init`, second to fifth step, change
0.4-0.8 % of them at a learning rate of 1e-6, 1.8-3.4 % at 1e-5 and 11-17 % at 1e-4. The first step of a run moves each
weight by the whole rate, and changes 4.4 %, 5.9 % and 22 %.

Whole publications and those of what changed take turns, each with the engine's checksums of every tensor. The time of
both is from the first byte gathered to the commit; the standstill is the part of it without generation.

With `--mbit` the engine is on a host of its own, behind a switch of that rate, and weights are broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM

from headrace.job.schema.job import Job
from headrace.rpc.net import Address
from services.rollout.engine.arguments import has_accelerator
from services.rollout.engine.fleet import Fleet, FleetTiming
from services.rollout.engine.process import EngineFactory, EngineNode, SglangProcess
from services.rollout.engine.router import Router
from services.rollout.fleet_build import engine_options, sglang_factory
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import Delta, GroupPlan, Plan
from services.trainer.control.senders import WeightSender, WeightWriter
from services.trainer.control.transport import sweep
from services.trainer.model.policy import Policy
from tests.support.fakes.same_weights import ALONE, SameWeights, all_ranks
from tests.support.hosts.hosts import network

BUCKET_BYTES = 512 << 20
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Published:
    seconds: float
    standstill: float
    num_bytes: int


class Weights:
    """In float32, as an optimizer has them, and in bfloat16."""

    def __init__(self, checkpoint: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._exact = {name: each.detach() for name, each in model.named_parameters() if name != "lm_head.weight"}
        self.sent = {name: each.bfloat16() for name, each in self._exact.items()}
        self._random = torch.Generator().manual_seed(1)
        self._moves = {name: self._drawn(exact) for name, exact in self._exact.items()}

    def step(self, lr: float) -> float:
        """Returns the share of changed values."""
        changed = total = 0
        for name, exact in self._exact.items():
            move = self._moves[name].mul_(_MOMENTUM).add_(self._drawn(exact), alpha=(1 - _MOMENTUM**2) ** 0.5)
            exact.add_(move, alpha=0.5 * lr)
            new = exact.bfloat16()
            changed += int((new.view(torch.int16) != self.sent[name].view(torch.int16)).sum())
            total += new.numel()
            self.sent[name].copy_(new)
        return changed / total

    def _drawn(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._random)


class Way:
    """One transport's publications to one receiver."""

    def __init__(
        self,
        name: str,
        weights: Mapping[str, torch.Tensor],
        checkpoint: Path,
        fleet: Fleet,
        root: Path,
        host: str = "127.0.0.1",
    ) -> None:
        policy = SameWeights(weights, checkpoint)
        self._specs = policy.hf_tensor_specs()
        self._root = root
        self._receiver = Receiver(fleet, root)
        self._base, self._version, self._folder = "", 0, root
        sent = cast(Policy, policy)
        self._sender: WeightSender | WeightWriter = (
            WeightWriter(sent, ALONE, lambda _: False, root=root, file_bytes=BUCKET_BYTES)
            if name == "disk"
            else WeightSender(sent, ALONE, lambda _: False, host=host, bucket_bytes=BUCKET_BYTES, timeout_seconds=600.0)
        )

    async def publish(self, version: int, *, changes: bool) -> Published:
        """What follows a commit is not counted, as the next step begins then: the copy of what is served."""
        sender, name, started = self._sender, f"e1-v{version}-0a1b2c3d", time.perf_counter()
        compared = await asyncio.to_thread(sender.compare) if changes else None
        num_bytes = sum(spec.num_bytes for spec in self._specs)
        if compared:
            assert compared.delta_bytes is not None, "more than half changed"
            num_bytes = compared.delta_bytes
        send = sender.send_delta if changes else sender.send
        if isinstance(sender, WeightWriter):
            sent = await asyncio.to_thread(send, name, {})
            buckets, groups, folder = [self._specs], (), self._root / name
            delta = Delta(self._base, base_folders=[self._folder])
        else:
            opened, described = sender.open(0), sender.describe()
            assert opened is not None
            assert described is not None
            buckets = [self._specs] if changes else described.buckets
            numbers = tuple(range(len(buckets)))
            groups = (GroupPlan(opened.name, opened.host, opened.port, numbers, opened.joined),)
            folder, delta = None, Delta(self._base, bucket_bytes=[num_bytes])
        plan = Plan(
            publication_id=name, epoch=1, policy_version=version, pause_mode="in_place", backend="gloo",
            deadline_seconds=600.0, buckets=dict(enumerate(buckets)), groups=groups, folder=folder,
        )  # fmt: skip
        begun = await self._receiver.begin(replace(plan, delta=delta) if changes else plan)
        sending = None if folder else asyncio.create_task(asyncio.to_thread(send, name, {0: begun.world_size}))
        for bucket in plan.buckets:
            await self._receiver.receive(name, bucket)
        if sending:
            sent = await sending
        assert sent is not None
        assert sent.error is None, sent.error
        committed = await self._receiver.commit(name, sent.checksums)
        seconds = time.perf_counter() - started
        self._base, self._folder = committed.weights_digest, folder or self._folder
        await asyncio.to_thread(sender.keep)
        sweep(self._root, {name}, 1)
        return Published(seconds, committed.paused_seconds, num_bytes)

    def close(self) -> None:
        self._sender.drop([0])


@dataclass(frozen=True)
class Hosts:
    """Where this process is, and where the engine is: a network namespace, and its address."""

    own_address: str
    engine_namespace: str
    engine_address: str

    def factory(self, job: Job, folder: Path) -> EngineFactory:
        """The engine, in its namespace."""
        options = replace(engine_options(job), host=self.engine_address)
        starter = ("ip", "netns", "exec", self.engine_namespace)
        node = EngineNode(0, Address(self.engine_address, 20000), starter=starter)
        log = folder / "engine-0.log"
        return lambda number: SglangProcess(options, number, log, has_accelerator=False, node=node)


async def measure(checkpoint: Path, rates: list[float], rounds: int, folder: Path, hosts: Hosts | None) -> None:
    job = Job.model_validate({"model": {"hf_checkpoint": checkpoint}, "sglang": {"dtype": "bfloat16"}})
    timing = FleetTiming(start_seconds=900)
    router = Router(job.rollout, folder / "router.log", request_seconds=60, timing=timing)
    factory = (
        hosts.factory(job, folder) if hosts else sglang_factory(job, folder, has_accelerator=await has_accelerator())
    )
    fleet = Fleet(1, 1, factory, router, timing)
    await asyncio.gather(router.start(), fleet.start())
    weights, version = Weights(checkpoint), 0
    print(f"{'transport':<11}{'lr':>7}{'changed':>9}{'bytes':>10}{'whole':>17}{'standstill':>19}", flush=True)
    try:
        with all_ranks():
            gc.freeze()  # as the services do
            for name in ("collective",) if hosts else ("disk", "collective"):
                own = hosts.own_address if hosts else "127.0.0.1"
                way = Way(name, weights.sent, checkpoint, fleet, folder / name, own)
                for lr in rates:
                    pairs: list[tuple[Published, Published]] = []
                    shares: list[float] = []
                    for _ in range(rounds + 1):  # the first one joins groups and takes memory
                        version += 2
                        weights.step(lr)
                        whole = await way.publish(version - 1, changes=False)
                        shares.append(weights.step(lr))
                        pairs.append((whole, await way.publish(version, changes=True)))
                    print_row(name, lr, statistics.median(shares[1:]), pairs[1:])
                way.close()
    finally:
        await asyncio.gather(fleet.stop(), router.stop())


def print_row(name: str, lr: float, share: float, pairs: list[tuple[Published, Published]]) -> None:
    """Medians; ratios are of the whole's."""
    num_bytes = statistics.median(delta.num_bytes / whole.num_bytes for whole, delta in pairs)
    seconds = statistics.median(delta.seconds for _, delta in pairs)
    ratio = statistics.median(delta.seconds / whole.seconds for whole, delta in pairs)
    paused = statistics.median(delta.standstill for _, delta in pairs)
    of_paused = statistics.median(delta.standstill / whole.standstill for whole, delta in pairs)
    print(
        f"{name:<11}{lr:>7.0e}{share:>9.2%}{num_bytes:>9.4f}×{seconds:>8.3f} s{ratio:>6.2f}×{paused:>10.3f} s"
        f"{of_paused:>6.2f}×",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, help="rate of the switch between trainer and engine, in Mbit/s")
    parser.add_argument("--hosts", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.mbit:
        with network(("trainer", "engine"), bits_per_second=given.mbit * 1e6) as hosts:
            trainer, engine = hosts.hosts["trainer"], hosts.hosts["engine"]
            words = [sys.executable, "-m", "tests.bench.weights.delta", str(given.checkpoint), "--lr"]
            words += [*map(str, given.lr), "--rounds", str(given.rounds)]
            words += ["--hosts", trainer.address, engine.namespace, engine.address]
            sys.exit(subprocess.run(trainer.command(words), check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        hosts_of_it = Hosts(*given.hosts) if given.hosts else None
        asyncio.run(measure(given.checkpoint, given.lr, given.rounds, Path(folder), hosts_of_it))


if __name__ == "__main__":
    main()
