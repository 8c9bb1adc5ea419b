"""Foreign clients: generated stubs, and of headrace nothing but what docs/client.md tells them to do."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from headrace.api.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from headrace.api.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.rolling.clients import until_done
from tests.support.rolling.tally import Tally

_PAUSE_SECONDS = 0.02
_SECONDS = 300.0
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Stubs:
    """Each works until `stopping` is set, over channels with `service_config`."""

    def __init__(self, addresses: Mapping[str, str], service_config: Mapping[str, Any], tally: Tally) -> None:
        self._addresses = addresses
        self._options = [
            ("grpc.service_config", json.dumps(service_config)),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.min_reconnect_backoff_ms", 200),
        ]
        self.tally = tally
        self.stopping = asyncio.Event()
        self.submitted = 0
        self.put: list[str] = []
        self.events: list[buffer_pb2.LedgerEvent] = []

    async def run(self) -> None:
        """All of them side by side, of the services that there are addresses of."""
        if "buffer" in self._addresses:
            async with self._channel("buffer") as channel:
                config = buffer_pb2.StreamConfig(
                    name="plain", n_samples_per_prompt=1, groups_per_step=1, max_staleness=1_000_000
                )
                request = buffer_pb2.CreateStreamRequest(config=config)
                await buffer_pb2_grpc.BufferServiceStub(channel).CreateStream(request, timeout=_SECONDS)
        await until_done(
            {
                "buffer": (self._submit_and_put,),
                "reward": (self._score,),
                "rollout": (self._generate, self._look_at_rollout),
                "trainer": (self._look_at_trainer,),
            },
            {"buffer": self._watch},
            self._addresses,
        )

    def check(self) -> None:
        """Every prompt was submitted once and every group put once, and the watcher has seen it all in order."""
        positions = [event.position for event in self.events]
        assert positions == sorted(set(positions))
        kinds = Counter(event.kind for event in self.events)
        assert kinds["submitted"] == self.submitted
        assert kinds["put"] == len(self.put) == len(set(self.put)) > 0

    @asynccontextmanager
    async def _channel(self, service: str) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self._addresses[service], options=self._options) as channel:
            yield channel

    async def _submit_and_put(self) -> None:
        async with self._channel("buffer") as channel:
            stub = buffer_pb2_grpc.BufferServiceStub(channel)
            while not self.stopping.is_set():
                prompts = text_prompts(f"plain-{self.submitted}")
                with self.tally.call("plain submit"):
                    await stub.SubmitPrompts(
                        buffer_pb2.SubmitPromptsRequest(stream="plain", prompts=prompts), timeout=_SECONDS
                    )
                self.submitted += 1
                request = buffer_pb2.LeaseGroupsRequest(
                    stream="plain", producer_id="plain", request_id=uuid.uuid4().hex, max_groups=1, wait_seconds=2.0
                )
                leases: list[buffer_pb2.GroupLease] = []
                with self.tally.call("plain lease"):
                    leases += (await stub.LeaseGroups(request, timeout=_SECONDS)).leases
                for lease in leases:
                    with self.tally.call("plain put"):
                        reply = await stub.PutGroups(
                            buffer_pb2.PutGroupsRequest(groups=[complete_put(lease)]), timeout=_SECONDS
                        )
                        assert not reply.results[0].HasField("refused"), reply
                    self.put.append(lease.group_id)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch(self) -> None:
        position = 0
        async with self._channel("buffer") as channel:
            stub: Any = buffer_pb2_grpc.BufferServiceStub(channel)
            while True:
                try:
                    async for reply in stub.Watch(buffer_pb2.WatchRequest(stream="plain", from_position=position)):
                        self.events += reply.events
                        position = reply.events[-1].position + 1
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _AGAIN:
                        self.tally.failed.append(f"plain watch: {error.code()} {error.details()}")
                self.tally.calls["plain watch"] += 1
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _score(self) -> None:
        async with self._channel("reward") as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            while not self.stopping.is_set():
                item = reward_pb2.ScoreItem(item_id="a", prompt="1 + 1", response="2", label="2")
                with self.tally.call("plain score"):
                    reply = await stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=_SECONDS)
                    assert reply.results[0].HasField("score"), reply
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _generate(self) -> None:
        async with self._channel("rollout") as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            while not self.stopping.is_set():
                with self.tally.call("plain generate"):
                    await _whole(stub)

    async def _look_at_trainer(self) -> None:
        async with self._channel("trainer") as channel:
            status = trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus
            while not self.stopping.is_set():
                with self.tally.call("plain status"):
                    await status(trainer_pb2.GetStatusRequest(), timeout=_SECONDS)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _look_at_rollout(self) -> None:
        async with self._channel("rollout") as channel:
            fleet = rollout_pb2_grpc.RolloutServiceStub(channel).GetFleet
            while not self.stopping.is_set():
                with self.tally.call("plain fleet"):
                    await fleet(rollout_pb2.GetFleetRequest(), timeout=_SECONDS)
                await asyncio.sleep(_PAUSE_SECONDS)


async def _whole(stub: Any) -> None:
    """One response; when its stream breaks it is begun again with the tokens that are there."""
    sampling = sample_pb2.SamplingParams(max_new_tokens=40)
    request = rollout_pb2.GenerateRequest(text="1 + 1 =", sampling=sampling, return_tokens=True)
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
