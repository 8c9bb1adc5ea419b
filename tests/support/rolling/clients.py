"""Users of `headrace.client`, and one of OpenAI's client."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.open import open_rollout
from headrace.client.reward import RewardClient
from headrace.client.trainer import TrainerClient
from headrace.score import Score, ScoreItem
from services.trainer.data.record import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.rolling.tally import Tally

GROUPS_PER_STEP = 2
_PAUSE_SECONDS = 0.02


class Clients:
    """Of the run whose services are at `addresses`. Each client works until `stopping` is set."""

    def __init__(self, addresses: dict[str, str], openai_url: str, tally: Tally, record: Path) -> None:
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
        """All of them side by side."""
        async with BufferClient(self.addresses["buffer"]) as buffer:
            await buffer.create_stream(
                pb.StreamConfig(name="own", n_samples_per_prompt=2, groups_per_step=GROUPS_PER_STEP, max_staleness=1)
            )
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(each()) for each in (self._watch, self._watch_progress)]
            others = (self._submit, self._produce, self._consume, self._score, self._generate, self._ask_openai, self._look)
            await asyncio.gather(*(tasks.create_task(each()) for each in others))
            for watcher in watchers:
                watcher.cancel()

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
        from openai import AsyncOpenAI

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

    async def _look(self) -> None:
        async with (
            TrainerClient(self.addresses["trainer"]) as trainer,
            open_rollout(self.addresses["rollout"]) as rollout,
            BufferClient(self.addresses["buffer"]) as buffer,
        ):
            while not self.stopping.is_set():
                with self.tally.call("status of the trainer"):
                    await trainer.status()
                with self.tally.call("fleet"):
                    await rollout.get_fleet()
                with self.tally.call("stats"):
                    await buffer.stats("own")
                await asyncio.sleep(_PAUSE_SECONDS)
