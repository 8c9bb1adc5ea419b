"""`make bench`: what a step costs where generation and training could go on side by side.

The loop, the ledger, producers, router and publications are the real ones. Engine and trainer only sleep, for as long
as the other does, so neither takes the other's processors, which on two cores would hide what is asked: whether one
waits for the other. The baseline is the longer of the two alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from transformers.utils.logging import disable_progress_bar

from headrace.api.buffer.v1 import buffer_pb2
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.rpc.log import drop_logs
from services.buffer.store.sqlite import SqliteStore
from services.rollout.build import rollout_service
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from services.rollout.service import RolloutParts
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.loop import Devices, Engines, train
from services.trainer.plan.batch import Batch
from services.trainer.standalone import NoEngines
from services.trainer.state import TrainState
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN

STREAM = "train"
GROUPS, SAMPLES = 8, 8
TOKENS = 20
WARM_STEPS = 2


@dataclass
class Ledger:
    """The loop's ledger, without a console to show it."""

    buffer: BufferClient

    async def rewind(self, step: int) -> int:
        return (await self.buffer.rewind(STREAM, step)).epoch

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        reply = await self.buffer.try_lease_batch(STREAM, epoch, step, wait_seconds=2.0)
        return Batch.of(reply) if reply.ready else None

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        reply = await self.buffer.try_lease_batch(STREAM, epoch, step)
        return Batch.of(reply) if reply.ready else None

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        await self.buffer.consume(STREAM, epoch, step, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self.buffer.commit(STREAM, epoch, step)

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        await self.buffer.set_policy_version(STREAM, epoch, policy_version)


@dataclass
class SleepingRanks:
    """Trains by sleeping; publishes to the fake engines as the rollout service does."""

    receiver: Receiver
    train_seconds: float
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    devices: Devices = field(default_factory=OwnDevices)
    engines: Engines = field(default_factory=NoEngines)

    async def restore(self) -> int:
        return 0

    async def claim(self, state: TrainState) -> None: ...

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(self.train_seconds)
        return {}

    async def prefetch(self, batch: Batch) -> None: ...

    async def publish(self, state: TrainState) -> dict[str, float]:
        name = f"p{next(self.numbers)}"
        groups = [GroupPlan(name, "127.0.0.1", 1, (0, 1))]
        await self.receiver.begin(replace(PLAN, publication_id=name, policy_version=state.step, groups=groups))
        for bucket in (0, 1):
            await self.receiver.receive(name, bucket)
        committed = await self.receiver.commit(name, CHECKSUMS)
        return {"publish/paused_seconds": committed.paused_seconds}

    async def save(self, state: TrainState) -> None: ...

    async def flush(self) -> None: ...

    def take_safe(self) -> TrainState | None:
        return None

    async def export(self) -> None: ...


@dataclass
class Watch:
    """The loop's console: notes when each step was done."""

    stopping: bool = False
    done_at: list[float] = field(default_factory=list)

    async def before_step(self, state: TrainState) -> bool:
        return True

    async def evaluate(self, state: TrainState) -> None: ...

    async def evaluated(self) -> None: ...

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.done_at.append(time.monotonic())


@dataclass
class Steps:
    """The job's rhythm: every step is published."""

    num_steps: int

    def publishes(self, state: TrainState) -> bool:
        return True

    def saves(self, state: TrainState) -> bool:
        return False


@contextlib.asynccontextmanager
async def stack(
    folder: Path, *, staleness: int, token_seconds: float
) -> AsyncIterator[tuple[BufferClient, RolloutParts]]:
    """Ledger, reward and rollout service, which makes at most one step's groups at a time, as full engines do."""
    make_tiny_qwen3(folder / "tokenizer")
    async with contextlib.AsyncExitStack() as exits:
        reward = await exits.enter_async_context(scripted_reward(score(0.5)))
        _, server = await exits.enter_async_context(served_buffer(SqliteStore(folder / "ledger")))
        buffer = await exits.enter_async_context(BufferClient(server.address))
        config = buffer_pb2.StreamConfig(
            name=STREAM, n_samples_per_prompt=SAMPLES, groups_per_step=GROUPS, max_staleness=staleness
        )
        await buffer.create_stream(config)
        await buffer.submit_prompts(STREAM, text_prompts(*(f"q{number}" for number in range(1000))))
        job = Job.model_validate(
            {
                "model": {"hf_checkpoint": folder / "tokenizer"},
                "rollout": {
                    "rollout_batch_size": GROUPS,
                    "n_samples_per_prompt": SAMPLES,
                    "rollout_max_response_len": TOKENS,
                    "max_groups_in_flight": GROUPS,
                },
                "services": {"buffer_address": server.address, "reward_address": reward.address},
            }
        )
        made = rollout_service(
            job, lambda _: FakeEngine(WIRE, token_seconds=token_seconds), folder, CollectorRegistry()
        )
        await made.start()
        exits.push_async_callback(made.stop)
        yield buffer, made.parts


async def seconds_of_a_step(steps: int, *, staleness: int, generation: float, training: float) -> float:
    """The middle one of so many steps, after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        async with stack(Path(folder), staleness=staleness, token_seconds=generation / TOKENS) as (buffer, parts):
            watch = Watch()
            await train(Ledger(buffer), SleepingRanks(parts.receiver, training), watch, Steps(WARM_STEPS + steps))
    return statistics.median(after - before for before, after in itertools.pairwise(watch.done_at[WARM_STEPS - 1 :]))


async def measure(steps: int, seconds: float) -> None:
    generation = await seconds_of_a_step(steps, staleness=1, generation=seconds, training=0.0)
    training = await seconds_of_a_step(steps, staleness=1, generation=0.0, training=seconds)
    print(f"a step of {GROUPS * SAMPLES} samples, engine and trainer at work for {seconds:g} s each: of the longer one")
    print(f"  generation alone                    {generation:6.2f} s")
    print(f"  training alone                      {training:6.2f} s")
    for staleness, name in ((1, "both, one step off"), (0, "both, on-policy, one after the other")):
        both = await seconds_of_a_step(steps, staleness=staleness, generation=seconds, training=seconds)
        print(f"  {name:36}{both:5.2f} s {both / max(generation, training):6.2f}×")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    disable_progress_bar()
    drop_logs()
    asyncio.run(measure(given.steps, given.seconds))


if __name__ == "__main__":
    main()
