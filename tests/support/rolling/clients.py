"""Users of `headrace.client`, and one of OpenAI's client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.open import open_rollout
from headrace.client.reward import RewardClient
from headrace.client.trainer import TrainerClient
from headrace.score import Score, ScoreItem
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.rolling.tally import Tally

GROUPS_PER_STEP = 2
_PAUSE_SECONDS = 0.02
_LAST_EVENTS_SECONDS = 1.0
"""In which watchers are sent what the others have done last."""


class Clients:
    """Of the run whose services are at `addresses`. Each client works until `stopping` is set."""

    def __init__(self, addresses: Mapping[str, str], openai_url: str | None, tally: Tally, record: Path) -> None:
        self.addresses = addresses
        self.tally = tally
        self.stopping = asyncio.Event()
        self.consumed: list[str] = []
        """Groups of the stream `own`."""
        self.submitted: list[str] = []
        self.events: list[pb.LedgerEvent] = []
        self.steps: list[int] = []
        self._openai_url = openai_url
        self._record = TrainingRecord(record)

    async def run(self) -> None:
        """All of them side by side, of the services that there are addresses of."""
        if "buffer" in self.addresses:
            async with BufferClient(self.addresses["buffer"]) as buffer:
                await buffer.create_stream(
                    pb.StreamConfig(
                        name="own", n_samples_per_prompt=2, groups_per_step=GROUPS_PER_STEP, max_staleness=1
                    )
                )
        await until_done(
            {
                "buffer": (self._submit, self._produce, self._consume, self._look_at_buffer),
                "reward": (self._score,),
                "rollout": (self._generate, self._look_at_rollout, *([self._ask_openai] if self._openai_url else [])),
                "trainer": (self._look_at_trainer,),
            },
            {"buffer": self._watch, "trainer": self._watch_progress},
            self.addresses,
        )

    def check(self) -> None:
        """Every prompt was submitted once and every group consumed once, and watchers have seen it all in order."""
        positions = [event.position for event in self.events]
        assert positions == sorted(set(positions))
        kinds = Counter(event.kind for event in self.events)
        assert kinds["submitted"] == len(self.submitted)
        assert kinds["consumed"] == len(self.consumed) == len(set(self.consumed)) > 0
        assert self.steps == list(range(self.steps[0], self.steps[0] + len(self.steps))) if self.steps else True

    async def _submit(self) -> None:
        async with BufferClient(self.addresses["buffer"]) as buffer:
            while not self.stopping.is_set():
                names = [f"p{len(self.submitted) + i}" for i in range(GROUPS_PER_STEP)]
                with self.tally.call("submit prompts"):
                    await buffer.submit_prompts("own", text_prompts(*names))
                self.submitted += names
                while len(self.submitted) - len(self.consumed) > 3 * GROUPS_PER_STEP and not self.stopping.is_set():
                    await asyncio.sleep(_PAUSE_SECONDS)

    async def _produce(self) -> None:
        async with BufferClient(self.addresses["buffer"]) as buffer:
            while not self.stopping.is_set():
                leases: list[pb.GroupLease] = []
                with self.tally.call("lease groups"):
                    leases += (await buffer.lease_groups("own", "producer", 2, wait_seconds=2.0)).leases
                if leases:
                    with self.tally.call("put groups"):
                        results = await buffer.put_groups([complete_put(lease) for lease in leases])
                        assert not [result.refused for result in results if result.HasField("refused")]

    async def _consume(self) -> None:
        step = 0
        async with BufferClient(self.addresses["buffer"]) as buffer:
            with self.tally.call("rewind"):
                epoch = (await buffer.rewind("own", 0)).epoch
            while not self.stopping.is_set():
                with self.tally.call("lease a batch"):
                    batch = await buffer.try_lease_batch("own", epoch, step, wait_seconds=2.0)
                if not batch.ready:
                    continue
                samples = [sample.sample_id for sample in Batch.of(batch).samples]
                with self.tally.call("fetch samples"):
                    assert len(await buffer.fetch_samples("own", samples)) == len(samples)
                self._record.append(step, Batch.of(batch))
                with self.tally.call("consume and commit"):
                    await buffer.consume("own", epoch, step, batch.digest)
                    await buffer.set_policy_version("own", epoch, step + 1)
                    await buffer.commit("own", epoch, step + 1)
                self.consumed += [group.group_id for group in batch.groups]
                step += 1

    async def _score(self) -> None:
        number = 0
        async with RewardClient(self.addresses["reward"]) as reward:
            while not self.stopping.is_set():
                number += 1
                item = ScoreItem(f"item-{number}", prompt="1 + 1", response="2", label="2", metadata={})
                with self.tally.call("score"):
                    (result,) = await reward.score([item], deadline_seconds=60.0)
                    assert isinstance(result, Score), result
                with self.tally.call("list scorers"):
                    assert await reward.list_scorers()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _generate(self) -> None:
        sampling = sample_pb2.SamplingParams(max_new_tokens=40)
        async with open_rollout(self.addresses["rollout"]) as rollout:
            while not self.stopping.is_set():
                with self.tally.call("generate"):
                    replies = [
                        reply
                        async for reply in rollout.generate(
                            rollout_pb2.GenerateRequest(text="1 + 1 =", sampling=sampling, return_tokens=True)
                        )
                    ]
                    assert sum(reply.tokens.shape[0] for reply in replies) == 40 or replies[-1].status == 1, replies

    async def _ask_openai(self) -> None:
        async with AsyncOpenAI(base_url=f"{self._openai_url}/v1", api_key="none") as client:
            while not self.stopping.is_set():
                with self.tally.call("openai"):
                    reply = await client.completions.create(model="policy", prompt="1 + 1 =", max_tokens=40)
                    assert reply.choices[0].finish_reason

    async def _watch(self) -> None:
        async with BufferClient(self.addresses["buffer"]) as buffer:
            with self.tally.call("watch"):
                async for event in buffer.watch("own"):
                    self.events.append(event)

    async def _watch_progress(self) -> None:
        async with TrainerClient(self.addresses["trainer"]) as trainer:
            with self.tally.call("watch progress"):
                async for row in trainer.watch_progress():
                    self.steps.append(row.step)

    async def _look_at_trainer(self) -> None:
        async with TrainerClient(self.addresses["trainer"]) as trainer:
            while not self.stopping.is_set():
                with self.tally.call("status of the trainer"):
                    await trainer.status()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _look_at_rollout(self) -> None:
        async with open_rollout(self.addresses["rollout"]) as rollout:
            while not self.stopping.is_set():
                with self.tally.call("fleet"):
                    await rollout.get_fleet()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _look_at_buffer(self) -> None:
        async with BufferClient(self.addresses["buffer"]) as buffer:
            while not self.stopping.is_set():
                with self.tally.call("stats"):
                    await buffer.stats("own")
                await asyncio.sleep(_PAUSE_SECONDS)


async def until_done(
    jobs: Mapping[str, Sequence[Callable[[], Coroutine[Any, Any, None]]]],
    watchers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    addresses: Mapping[str, str],
) -> None:
    """Runs the jobs of the services that there are; watchers are ended when all jobs have ended."""
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watch()) for service, watch in watchers.items() if service in addresses]
        working = [tasks.create_task(job()) for service in addresses for job in jobs[service]]
        await asyncio.gather(*working)
        await asyncio.sleep(_LAST_EVENTS_SECONDS)
        for watcher in watching:
            watcher.cancel()
