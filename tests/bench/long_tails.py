"""`make bench`: a step's time where a few responses are much longer than the others, of generation and training alone.

`python -m tests.bench.long_tails`: loop, ledger, producers, publications and rewards are the real ones. The engine
decodes without a model: it has slots, all of which advance token by token, a little slower the more of them are in use.
The trainer sleeps. Lengths are lognormal, and half of their variance is the prompt's, so that long ones come together.
They follow from prompt, sample and draw: a response that is lost is drawn again, the same in every setting.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from prometheus_client import CollectorRegistry
from transformers.utils.logging import disable_progress_bar

from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.job.rules.production import check_production
from headrace.job.schema.job import Job
from headrace.rpc.log import drop_logs
from services.buffer.build import train_stream
from services.buffer.store.sqlite import SqliteStore
from services.rollout.build import rollout_service
from services.rollout.publication.receiver import Receiver
from services.rollout.publication.state import GroupPlan
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.loop import train
from services.trainer.plan.batch import Batch
from services.trainer.state import NONE_STALE, EngineIds, StaleEngines, TrainState
from tests.support import virtual_time
from tests.support.fakes.fake_engine import FakeEngine, reply_of
from tests.support.fakes.fake_fleet import WIRE, without_router
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer
from tests.support.processes.reward_server import served_reward
from tests.support.virtual_time import VirtualTime
from tests.unit.rollout.publication.test_receiver import CHECKSUMS, PLAN

Changes = Sequence[Mapping[str, Mapping[str, Any]]]
"""Leaves of a job by section."""
STREAM = "train"
GROUPS, SAMPLES = 8, 8
SLOTS = GROUPS * SAMPLES
MEAN_TOKENS, MOST_TOKENS = 100, 1600
SLOWDOWN = 0.5
"""By how much a token takes longer with all slots in use than alone, as a share."""
TICK_TOKENS = 4
"""The tokens after which the engine looks at its queue."""
WARM_STEPS = 2
TOKEN = 200
"""What it answers with; no prompt has it, so it tells how much of a response a request brings."""
OVER_SAMPLING = {"rollout": {"over_sampling_batch_size": GROUPS * 3 // 2}}
PARTIAL = {"rollout": {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}}
ONE_STEP_OFF = {"buffer": {"max_staleness": 1}}
THREE_STEPS_OFF = {"buffer": {"max_staleness": 3}}
SETTINGS: Mapping[str, Changes] = {
    "on-policy": [],
    "over-sampling": [OVER_SAMPLING],
    "over-sampling, partial": [OVER_SAMPLING, PARTIAL],
    "one step off": [ONE_STEP_OFF],
    "one step off, partial": [ONE_STEP_OFF, PARTIAL],
    "one step off, over-sampling": [ONE_STEP_OFF, OVER_SAMPLING],
    "one step off, both": [ONE_STEP_OFF, OVER_SAMPLING, PARTIAL],
    "three steps off": [THREE_STEPS_OFF],
    "three steps off, partial": [THREE_STEPS_OFF, PARTIAL],
}
SIGMAS = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Lengths:
    """Of responses, in tokens: MEAN_TOKENS on average before the longest are cut."""

    sigma: float

    def of(self, group: int, index: int, draw: int) -> int:
        shared, own = (np.random.default_rng(key).normal() for key in ([1, group], [2, group, index, draw]))
        length = math.exp(math.log(MEAN_TOKENS) - self.sigma**2 / 2 + self.sigma * (shared + own) / math.sqrt(2))
        return min(max(round(length), 1), MOST_TOKENS)

    def mean(self, groups: int) -> float:
        """Of all first draws of so many groups."""
        return float(np.mean([self.of(group, index, 0) for group in range(groups) for index in range(SAMPLES)]))


def seconds_per_token(token_seconds: float, in_use: int) -> float:
    """Of each of the slots in use; `token_seconds` with all of them."""
    return token_seconds * (1 + SLOWDOWN * in_use / SLOTS) / (1 + SLOWDOWN)


@dataclass(eq=False)
class Response:
    """One request at the engine."""

    request_id: str
    left: int
    versions: list[str] = field(default_factory=list)
    finish: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LongTailEngine(FakeEngine):
    """Decodes in ticks: every tick, each response that has a slot gets a few tokens."""

    def __init__(self, lengths: Lengths, token_seconds: float) -> None:
        super().__init__(WIRE, token_seconds=token_seconds)
        self.calls, self.bodies = deque(maxlen=1), deque(maxlen=1)
        self._lengths = lengths
        self._draws: Counter[str] = Counter()
        self._responses: list[Response] = []
        """Those that came first have the slots."""
        self._arrived = asyncio.Event()
        self._decoding: asyncio.Task[None] | None = None

    async def start(self, *, seconds: float) -> None:
        await super().start(seconds=seconds)
        self._decoding = asyncio.create_task(self._decode())

    async def stop(self, grace_seconds: float = 0.0) -> None:
        if self._decoding:
            self._decoding.cancel()
        await super().stop(grace_seconds)

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time()
        while True:
            if not (self._responses and self._running.is_set()):
                await (self._running.wait() if self._responses else self._arrived.wait())
                self._arrived.clear()
                end = loop.time()
                continue
            active = self._responses[:SLOTS]
            end += TICK_TOKENS * seconds_per_token(self.token_seconds, len(active))
            await asyncio.sleep(end - loop.time())
            if self._running.is_set():
                self._advance(active)

    def _advance(self, active: Sequence[Response]) -> None:
        for response in active:
            if response.finish.done():
                continue
            if response.request_id in self._ended:
                response.finish.set_result("abort")
                continue
            made = min(TICK_TOKENS, response.left)
            response.left -= made
            response.versions += [self._version] * made
            self.num_tokens += made
            if not response.left:
                response.finish.set_result("stop")

    def _end_all(self) -> None:
        super()._end_all()
        for response in self._responses:
            if not response.finish.done():
                response.finish.set_result("abort")

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        group_id, _, index = body["rid"].partition("#")[0].rsplit("/", 2)
        key = f"{group_id}/{index}"
        group = int(group_id.rpartition("/")[2])
        length = self._lengths.of(group, int(index), self._draws[key])
        response = Response(body["rid"], length - body["input_ids"].count(TOKEN))
        self._responses.append(response)
        self._arrived.set()
        finish = None
        try:
            finish = await response.finish
        finally:
            self._responses.remove(response)
            self._draws[key] += finish != "abort"  # nobody continues what ended, or what its caller has left
        made = [TOKEN] * len(response.versions)
        return web.json_response(reply_of(self._score(body["input_ids"]), made, response.versions, finish))


@dataclass(frozen=True)
class Step:
    """What a step was trained on, and the engine's tokens until then."""

    done_at: float
    generated: int
    samples: Sequence[sample_pb2.SampleEnvelope]

    @property
    def num_tokens(self) -> int:
        """Of the responses."""
        return sum(sample.response_tokens for sample in self.samples)

    def trained(self, policy_versions: Container[int]) -> int:
        """The tokens of these versions that are trained."""
        ranges = [tokens for sample in self.samples for tokens in sample.policy_ranges if not tokens.masked]
        return sum(tokens.end - tokens.start for tokens in ranges if tokens.policy_version in policy_versions)


@dataclass(frozen=True)
class Figures:
    """Of the steps of a run, without its first ones."""

    seconds: float
    """Of a step."""
    length: float
    """The mean of the samples in the batches."""
    trained: float
    """Tokens of a step."""
    masked: float
    """The share of the batches' tokens that is not trained."""
    lost: float
    """The share of the engine's tokens that is in no batch."""
    stale: float
    """The share of the trained tokens that older policies made."""

    @classmethod
    def of(cls, steps: Sequence[Step], warm: int = WARM_STEPS) -> Figures:
        """`warm`: the steps that do not count."""
        before, measured = steps[warm - 1], steps[warm:]
        in_batches = sum(step.num_tokens for step in measured)
        stale = sum(step.trained(range(number)) for number, step in enumerate(measured, warm))
        trained = sum(step.trained(range(number + 1)) for number, step in enumerate(measured, warm))
        return cls(
            seconds=(measured[-1].done_at - before.done_at) / len(measured),
            length=in_batches / sum(len(step.samples) for step in measured),
            trained=trained / len(measured),
            masked=1 - trained / in_batches,
            lost=1 - in_batches / (measured[-1].generated - before.generated),
            stale=stale / trained,
        )


@dataclass
class Run:
    """The loop's ledger, ranks, engines, console and schedule: trains by sleeping, publishes every step."""

    buffer: BufferClient
    receiver: Receiver
    engine: LongTailEngine
    pause_mode: str
    train_seconds: float
    num_steps: int
    stopping = False
    devices = OwnDevices()
    steps: list[Step] = field(default_factory=list)
    samples: Sequence[sample_pb2.SampleEnvelope] = ()
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def engines(self) -> Run:
        return self

    async def rewind(self, step: int) -> int:
        return (await self.buffer.rewind(STREAM, step)).epoch

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        reply = await self.buffer.try_lease_batch(STREAM, epoch, step, wait_seconds=2.0)
        if not reply.ready:
            return None
        self.samples = [sample for group in reply.groups for sample in group.samples]
        return Batch.of(reply)

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        return None

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        await self.buffer.consume(STREAM, epoch, step, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self.buffer.commit(STREAM, epoch, step)

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        await self.buffer.set_policy_version(STREAM, epoch, policy_version)

    async def restore(self) -> int:
        return 0

    async def claim(self, state: TrainState) -> None: ...

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        await asyncio.sleep(self.train_seconds)
        return {}

    async def prefetch(self, batch: Batch) -> None: ...

    async def publish(self, state: TrainState) -> dict[str, float]:
        name = f"p{next(self.numbers)}"
        plan = replace(PLAN, publication_id=name, policy_version=state.step, pause_mode=self.pause_mode)
        await self.receiver.begin(replace(plan, groups=[GroupPlan(name, "127.0.0.1", 1, (0, 1))]))
        for bucket in (0, 1):
            await self.receiver.receive(name, bucket)
        await self.receiver.commit(name, CHECKSUMS)
        return {}

    async def stale_engines(self, state: TrainState) -> StaleEngines:
        return NONE_STALE

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None: ...

    async def save(self, state: TrainState) -> None: ...

    async def flush(self) -> None: ...

    def take_safe(self) -> TrainState | None:
        return None

    async def export(self) -> None: ...

    async def before_step(self, state: TrainState) -> bool:
        return True

    async def evaluate(self, state: TrainState) -> None: ...

    async def evaluated(self) -> None: ...

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.steps.append(Step(asyncio.get_running_loop().time(), self.engine.num_tokens, self.samples))

    def publishes(self, state: TrainState) -> bool:
        return True

    def saves(self, state: TrainState) -> bool:
        return False


def job_of(checkpoint: Path, buffer: str, reward: str, changes: Changes) -> Job:
    sections: dict[str, dict[str, Any]] = {
        "model": {"hf_checkpoint": checkpoint},
        "rollout": {
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": SAMPLES,
            "rollout_max_response_len": MOST_TOKENS,
        },
        "services": {"buffer_address": buffer, "reward_address": reward},
    }
    for section, leaves in itertools.chain.from_iterable(each.items() for each in changes):
        sections[section] = {**sections.get(section, {}), **leaves}
    job = Job.model_validate(sections)
    check_production(job)
    return job


@contextlib.asynccontextmanager
async def running(
    checkpoint: Path, reward: str, lengths: Lengths, changes: Changes, seconds: float, num_steps: int
) -> AsyncIterator[Run]:
    """Ledger and rollout service. Generation with all slots in use, and training, take `seconds` a step."""
    async with contextlib.AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        ledger, server = await exits.enter_async_context(served_buffer(SqliteStore(folder / "ledger")))
        buffer = await exits.enter_async_context(BufferClient(server.address))
        job = job_of(checkpoint, server.address, reward, changes)
        await ledger.create_stream(replace(train_stream(job), lease_seconds=3600.0))
        num_prompts = GROUPS * (num_steps + 4)
        await buffer.submit_prompts(STREAM, text_prompts(*(f"q{number}" for number in range(num_prompts))))
        engine = LongTailEngine(lengths, seconds * SLOTS / (GROUPS * SAMPLES * MEAN_TOKENS))
        with without_router(engine):
            service = rollout_service(job, lambda _: engine, folder, CollectorRegistry())
        await service.start()
        exits.push_async_callback(service.stop)
        receiver, mode = service.parts.receiver, job.publish.update_weight_pause_mode
        yield Run(buffer, receiver, engine, mode, seconds, num_steps)


@contextlib.asynccontextmanager
async def measuring(seconds: float, num_steps: int) -> AsyncIterator[Callable[[Lengths, Changes], Awaitable[Figures]]]:
    """Gives the figures of runs of so many steps after the first ones."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        checkpoint = make_tiny_qwen3(Path(folder))
        async with served_reward(rm_type="random") as reward:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTime)
            loop.begin()

            async def figures(lengths: Lengths, changes: Changes) -> Figures:
                run = running(checkpoint, reward.address, lengths, changes, seconds, WARM_STEPS + num_steps)
                async with run as everything:
                    await train(everything, everything, everything, everything)
                return Figures.of(everything.steps)

            yield figures


async def bench(sigmas: Sequence[float], settings: Sequence[str], seconds: float, num_steps: int) -> None:
    """Prints a row for each sigma and setting."""
    async with measuring(seconds, num_steps) as figures:
        await _rows(figures, sigmas, settings, seconds, num_steps)


async def _rows(
    figures: Callable[[Lengths, Changes], Awaitable[Figures]],
    sigmas: Sequence[float],
    settings: Sequence[str],
    seconds: float,
    num_steps: int,
) -> None:
    print(f"a step is {GROUPS} groups of {SAMPLES}, the engine has {SLOTS} slots, training takes {seconds:g} s")
    for sigma in sigmas:
        mean = Lengths(sigma).mean(GROUPS * (WARM_STEPS + num_steps))
        alone = seconds * mean / MEAN_TOKENS + seconds
        print(f"sigma {sigma:g}: mean length {mean:.0f}, generation with all slots and training {alone:.2f} s")
        for name in settings:
            of = await figures(Lengths(sigma), SETTINGS[name])
            rate = of.trained / of.seconds / (GROUPS * SAMPLES * mean / alone)
            print(
                f"  {name:28} {of.seconds / alone:5.2f}×  trained tokens/s {rate:5.2f}×  mean length "
                f"{of.length / mean:5.2f}×  lost {of.lost:4.0%}  masked {of.masked:4.0%}  stale {of.stale:4.0%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="of generation and of training")
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS)
    parser.add_argument("--setting", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    args = parser.parse_args()
    disable_progress_bar()
    drop_logs()
    virtual_time.run(bench(args.sigma, args.setting, args.seconds, args.steps))


if __name__ == "__main__":
    main()
