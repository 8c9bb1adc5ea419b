"""Clients of a run whose services are restarted: each goes on until it is told to end, and no call of it may fail.

Some use `headrace.client`, one OpenAI's; the foreign ones have generated stubs, and of headrace nothing but what
docs/client.md tells them to do.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from openai import AsyncOpenAI

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.buffer.v1 import buffer_pb2_grpc
from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace.client.buffer import BufferClient
from headrace.client.open import open_rollout
from headrace.client.reward import RewardClient
from headrace.client.rollout import Rollout
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from headrace.score import Score, ScoreItem
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put, text_prompts

_SECONDS = 300.0
_PAUSE_SECONDS = 0.02
_LAST_EVENTS_SECONDS = 1.0
"""In which watchers are sent what the others have done last."""
_SAMPLING = sample_pb2.SamplingParams(max_new_tokens=40)
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Clients:
    """Of the run whose services are at `addresses`; a call that raises is written down, and its client goes on."""

    def __init__(
        self, addresses: Mapping[str, str], openai_url: str, service_config: Mapping[str, Any], record: Path
    ) -> None:
        """`service_config` is the stubs'; the stream `own` is trained, and `record` is what its trainer writes down."""
        self.addresses = addresses
        self.calls: Counter[str] = Counter()
        self.failed: list[str] = []
        self.stopping = asyncio.Event()
        self.consumed: list[str] = []
        self.submitted: Counter[str] = Counter()
        self.put: list[str] = []
        self.events: dict[str, list[pb.LedgerEvent]] = {"own": [], "plain": []}
        self.steps: list[int] = []
        self._openai_url = openai_url
        self._config = json.dumps(service_config)
        self._record = TrainingRecord(record)

    async def run(self) -> None:
        """All of them side by side, until `stopping` is set."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            buffer = await stack.enter_async_context(BufferClient(self.addresses["buffer"]))
            reward = await stack.enter_async_context(RewardClient(self.addresses["reward"]))
            rollout = open_rollout(self.addresses["rollout"])
            await stack.enter_async_context(rollout)
            trainer = await stack.enter_async_context(TrainerClient(self.addresses["trainer"]))
            openai = await stack.enter_async_context(AsyncOpenAI(base_url=f"{self._openai_url}/v1", api_key="none"))
            stubs = {name: await stack.enter_async_context(self._channel(name)) for name in self.addresses}
            for name in self.events:
                await buffer.create_stream(
                    pb.StreamConfig(name=name, n_samples_per_prompt=2, groups_per_step=2, max_staleness=1_000_000)
                )
            watching = [
                tasks.create_task(work)
                for work in (self._watch(buffer), self._watch_progress(trainer), self._watch_plain(stubs["buffer"]))
            ]
            step, epoch = iter(range(1_000_000)), (await buffer.rewind("own", 0)).epoch
            calls: Mapping[str, Callable[[], Awaitable[object]]] = {
                "submit": lambda: self._submit(buffer),
                "produce": lambda: self._produce(buffer),
                "consume": lambda: self._consume(buffer, epoch, step),
                "stats": lambda: buffer.stats("own"),
                "score": lambda: _score(reward),
                "scorers": reward.list_scorers,
                "generate": lambda: _generate(rollout),
                "fleet": rollout.get_fleet,
                "openai": lambda: _ask_openai(openai),
                "status": trainer.status,
                "plain submit and put": lambda: self._plain_put(stubs["buffer"]),
                "plain score": lambda: _plain_score(stubs["reward"]),
                "plain generate": lambda: _plain_generate(stubs["rollout"]),
                "plain status": lambda: _plain_status(stubs["trainer"]),
            }
            self.calls.update(dict.fromkeys(calls, 0))
            await asyncio.gather(*(self._go_on(name, call) for name, call in calls.items()))
            await asyncio.sleep(_LAST_EVENTS_SECONDS)
            for watcher in watching:
                watcher.cancel()

    async def until_all_have_called(self) -> None:
        """Waits until every client has finished two more calls: one of them began after now."""
        async with asyncio.timeout(600):
            while not self.calls:
                await asyncio.sleep(0.05)
            before = dict(self.calls)
            while any(self.calls[name] < count + 2 for name, count in before.items()) and not self.failed:
                await asyncio.sleep(0.05)

    def check(self) -> None:
        """Each prompt was submitted once, each group put or consumed once, and watchers have seen it all in order."""
        assert not self.failed
        kinds = {}
        for stream, events in self.events.items():
            positions = [event.position for event in events]
            assert positions == sorted(set(positions))
            kinds[stream] = Counter(event.kind for event in events)
            assert kinds[stream]["submitted"] == self.submitted[stream]
        assert kinds["own"]["consumed"] == len(self.consumed) == len(set(self.consumed)) > 0
        assert kinds["plain"]["put"] == len(self.put) == len(set(self.put)) > 0
        assert self.steps == list(range(self.steps[0], self.steps[0] + len(self.steps)))

    async def _go_on(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        while not self.stopping.is_set():
            try:
                await call()
                self.calls[name] += 1
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a failed call
                self.failed.append(f"{name}: {type(error).__name__}: {error}"[:500])
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _submit(self, buffer: BufferClient) -> None:
        if self.submitted["own"] - len(self.consumed) <= 6:
            await buffer.submit_prompts("own", text_prompts(*(f"p{self.submitted['own'] + i}" for i in range(2))))
            self.submitted["own"] += 2

    async def _produce(self, buffer: BufferClient) -> None:
        leases = (await buffer.lease_groups("own", "producer", 2, wait_seconds=2.0)).leases
        results = await buffer.put_groups([complete_put(lease) for lease in leases]) if leases else ()
        assert not [result.refused for result in results if result.HasField("refused")]

    async def _consume(self, buffer: BufferClient, epoch: int, steps: Iterator[int]) -> None:
        step = next(steps)
        while not (batch := await buffer.try_lease_batch("own", epoch, step, wait_seconds=2.0)).ready:
            if self.stopping.is_set():
                return
        samples = [sample.sample_id for sample in Batch.of(batch).samples]
        assert len(await buffer.fetch_samples("own", samples)) == len(samples)
        self._record.append(step, Batch.of(batch))
        await buffer.consume("own", epoch, step, batch.digest)
        await buffer.set_policy_version("own", epoch, step + 1)
        await buffer.commit("own", epoch, step + 1)
        self.consumed += [group.group_id for group in batch.groups]

    async def _watch(self, buffer: BufferClient) -> None:
        try:
            async for event in buffer.watch("own"):
                self.events["own"].append(event)
        except HeadraceError as error:
            self.failed.append(f"watch: {error}")

    async def _watch_progress(self, trainer: TrainerClient) -> None:
        try:
            async for row in trainer.watch_progress():
                self.steps.append(row.step)
        except HeadraceError as error:
            self.failed.append(f"watch of progress: {error}")

    def _channel(self, service: str) -> grpc.aio.Channel:
        waits = {"initial": 200, "max": 1000, "min": 200}
        backoffs = [(f"grpc.{name}_reconnect_backoff_ms", value) for name, value in waits.items()]
        return grpc.aio.insecure_channel(
            self.addresses[service], options=[("grpc.service_config", self._config), *backoffs]
        )

    async def _plain_put(self, channel: grpc.aio.Channel) -> None:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        prompts = text_prompts(f"plain-{self.submitted['plain']}")
        await stub.SubmitPrompts(pb.SubmitPromptsRequest(stream="plain", prompts=prompts), timeout=_SECONDS)
        self.submitted["plain"] += 1
        request = pb.LeaseGroupsRequest(
            stream="plain", producer_id="plain", request_id=uuid.uuid4().hex, max_groups=1, wait_seconds=2.0
        )
        for lease in (await stub.LeaseGroups(request, timeout=_SECONDS)).leases:
            reply = await stub.PutGroups(pb.PutGroupsRequest(groups=[complete_put(lease)]), timeout=_SECONDS)
            assert not reply.results[0].HasField("refused"), reply
            self.put.append(lease.group_id)

    async def _watch_plain(self, channel: grpc.aio.Channel) -> None:
        stub: Any = buffer_pb2_grpc.BufferServiceStub(channel)
        position = 0
        while True:
            try:
                async for reply in stub.Watch(pb.WatchRequest(stream="plain", from_position=position)):
                    self.events["plain"] += reply.events
                    position = reply.events[-1].position + 1
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AGAIN:
                    self.failed.append(f"plain watch: {error.code()} {error.details()}")
            await asyncio.sleep(_PAUSE_SECONDS)


async def _score(reward: RewardClient) -> None:
    (result,) = await reward.score([ScoreItem("item", "1 + 1", "2", "2")], deadline_seconds=60.0)
    assert isinstance(result, Score), result


async def _generate(rollout: Rollout) -> None:
    request = rollout_pb2.GenerateRequest(text="1 + 1 =", sampling=_SAMPLING, return_tokens=True)
    replies = [reply async for reply in rollout.generate(request)]
    assert sum(reply.tokens.shape[0] for reply in replies) == 40 or replies[-1].status == 1, replies


async def _ask_openai(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(model="policy", prompt="1 + 1 =", max_tokens=40)
    assert reply.choices[0].finish_reason


async def _plain_score(channel: grpc.aio.Channel) -> None:
    item = reward_pb2.ScoreItem(item_id="a", prompt="1 + 1", response="2", label="2")
    stub = reward_pb2_grpc.RewardServiceStub(channel)
    reply = await stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=_SECONDS)
    assert reply.results[0].HasField("score"), reply


async def _plain_status(channel: grpc.aio.Channel) -> None:
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=_SECONDS)


async def _plain_generate(channel: grpc.aio.Channel) -> None:
    """One response; when its stream breaks it is begun again with the tokens that are there."""
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    request = rollout_pb2.GenerateRequest(text="1 + 1 =", sampling=_SAMPLING, return_tokens=True)
    data = b""
    while True:
        try:
            async for reply in stub.Generate(request, timeout=_SECONDS):
                data += reply.tokens.data
                if reply.status:
                    assert reply.status != sample_pb2.SAMPLE_STATUS_COMPLETED or len(data) <= 4 * 40
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() not in _AGAIN:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
        if data:
            request.begun.CopyFrom(
                sample_pb2.Column(name="tokens", dtype=sample_pb2.DTYPE_INT32, shape=[len(data) // 4], data=data)
            )
