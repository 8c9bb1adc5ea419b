"""`python -m tests.bench.rank_control`: what orders to the other ranks cost rank 0 in memory, and a follower at rest.

Two followers get 2,000 steps of 4,096 facts and say that they have each. The baseline is how headrace did it before:
signed JSON under numbered keys of a TCPStore in rank 0, which each follower asks for 200 times a second. Each way has
processes of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from headrace.process.memory import resident_bytes
from services.trainer.control import channel as wire
from services.trainer.control.channel import Channel
from services.trainer.control.ranks import RankGroup, follow
from services.trainer.control.worker import RankWorker
from services.trainer.megatron.rendezvous import listener
from services.trainer.plan.batch import SampleFacts
from tests.support.fakes.idle_worker import IdleWorker
from tests.support.ledgers.facts import facts

FOLLOWERS = (1, 2)
SECRET = bytes(32)
IDLE_SECONDS = 10.0
_spawn = multiprocessing.get_context("spawn")


def by_channel(steps: int, samples: list[SampleFacts]) -> dict[str, float]:
    return asyncio.run(_by_channel(steps, samples))


async def _by_channel(steps: int, samples: list[SampleFacts]) -> dict[str, float]:
    channel = Channel(0, 3, SECRET)
    port = await channel.listen(listener("127.0.0.1"))
    followers = started(follow_channel, port)
    wire._CONNECT_SECONDS = 600.0  # the followers' imports count here
    await channel.until_complete()
    group = RankGroup(channel, IdleWorker(), ThreadPoolExecutor(1))

    async def step(number: int) -> None:
        await group.call(RankWorker.prefetch, samples)
        await group.gather(60.0, RankWorker.describe_weights)  # all have done all

    await step(0)
    before = rss_mib()
    began = time.perf_counter()
    for number in range(1, steps):
        await step(number)
    measured = {"before": before, "after": rss_mib(), "seconds": time.perf_counter() - began}
    cpu = cpu_seconds(followers)
    await asyncio.sleep(IDLE_SECONDS)
    measured["idle"] = cpu_seconds(followers) - cpu
    await group.gather(60.0, RankWorker.leave)
    await channel.close()
    for each in followers:
        each.join()
    return measured


def follow_channel(rank: int, port: int) -> None:
    async def main() -> None:
        channel = Channel(rank, 3, SECRET)
        await channel.connect("127.0.0.1", port)
        await channel.guard(follow(channel, IdleWorker(), ThreadPoolExecutor(1)))
        await channel.close()

    asyncio.run(main())


def by_store(steps: int, samples: list[SampleFacts]) -> dict[str, float]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    followers = started(follow_store, store.port)

    def step(number: int) -> None:
        put(store, f"command/{number}", json.dumps({"samples": [asdict(each) for each in samples]}))
        for rank in FOLLOWERS:
            wait_for(store, f"done/{number}/{rank}")

    step(0)
    before = rss_mib()
    began = time.perf_counter()
    for number in range(1, steps):
        step(number)
    measured = {"before": before, "after": rss_mib(), "seconds": time.perf_counter() - began}
    cpu = cpu_seconds(followers)
    time.sleep(IDLE_SECONDS)
    measured["idle"] = cpu_seconds(followers) - cpu
    for each in followers:
        each.kill()
    return measured


def follow_store(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    number = 0
    while True:
        for each in json.loads(wait_for(store, f"command/{number}"))["samples"]:
            SampleFacts(**each)
        put(store, f"done/{number}/{rank}", "1")
        number += 1


def put(store: dist.TCPStore, key: str, value: str) -> None:
    store.set(key, signature(key, value.encode()) + value)


def wait_for(store: dist.TCPStore, key: str) -> bytes:
    while not store.check([key]):
        time.sleep(0.005)
    found: bytes = store.get(key)
    assert hmac.compare_digest(found[:64], signature(key, found[64:]).encode())
    return found[64:]


def signature(key: str, value: bytes) -> str:
    return hmac.digest(SECRET, key.encode() + b"=" + value, "sha256").hex()


def started(target: object, port: int) -> list[BaseProcess]:
    """One process for every follower."""
    found = [_spawn.Process(target=target, args=(rank, port), daemon=True) for rank in FOLLOWERS]  # type: ignore[arg-type]
    for each in found:
        each.start()
    return list(found)


def rss_mib() -> float:
    """Of this process."""
    return resident_bytes(os.getpid()) / 2**20


def cpu_seconds(processes: list[BaseProcess]) -> float:
    """Of one of them, user and system, so far."""
    fields = Path(f"/proc/{processes[0].pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--facts", type=int, default=4096, help="samples of a step")
    parser.add_argument("--way", choices=("store", "channel"), help="this one alone, in this process; prints JSON")
    args = parser.parse_args()
    samples = [facts(f"sample-{number:08d}", f"group-{number // 8:08d}", 0.5) for number in range(args.facts)]
    if args.way:
        measure = by_store if args.way == "store" else by_channel
        print(json.dumps(measure(args.steps, samples)))
        return
    print(f"{args.steps} steps of {args.facts} facts to {len(FOLLOWERS)} followers")
    for way, name in (("store", "JSON in a TCPStore (baseline)"), ("channel", "one channel a rank")):
        command = [sys.executable, "-m", "tests.bench.rank_control", "--way", way]
        command += ["--steps", str(args.steps), "--facts", str(args.facts)]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(ended.stdout.splitlines()[-1])
        print(
            f"{name}: rank 0 {found['before']:.0f} MiB before and {found['after']:.0f} MiB after, "
            f"{found['seconds'] / args.steps * 1000:.1f} ms a step, "
            f"a follower at rest {found['idle']:.2f} s of CPU in {IDLE_SECONDS:g} s"
        )


if __name__ == "__main__":
    main()
