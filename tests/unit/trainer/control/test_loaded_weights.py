"""The first weights are sent only if engines have not loaded the same ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import ChecksumMismatch, Unavailable
from headrace.job.schema.run import PublishSection
from headrace.publication import TensorSpec
from services.trainer.control.channel import Channel
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import RankGroup
from services.trainer.control.senders import Sent, StageGroup, StageWeights
from services.trainer.control.transport import CollectiveTransport
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.state import TrainState
from tests.support.fakes.idle_worker import IdleWorker

OURS = {"t": "0123"}


class Engines:
    """Have loaded `loaded`, and say no to it as often as they are told."""

    def __init__(self, loaded: Mapping[str, str], *noes: Exception) -> None:
        self.ways: list[int] = []
        self._loaded = loaded
        self._noes = list(noes)

    async def begin_publish(self, request: pb.BeginPublishRequest, **_: Any) -> pb.BeginPublishResponse:
        self.ways.append(request.transport)
        if self._noes:
            raise self._noes.pop(0)
        assert request.groups or request.transport == pb.TRANSPORT_LOADED
        return pb.BeginPublishResponse(world_size=2)

    async def publish_bucket(self, *_: object, **__: Any) -> None:
        assert self.ways[-1] == pb.TRANSPORT_COLLECTIVE

    async def commit_publish(self, _: str, checksums: Mapping[str, str], **__: Any) -> pb.CommitPublishResponse:
        if self.ways[-1] == pb.TRANSPORT_LOADED and checksums != self._loaded:
            raise ChecksumMismatch("1 of 1 tensors differ")
        return pb.CommitPublishResponse(engine_ids=["engine-0"])

    async def abort_publish(self, *_: object) -> None: ...


@asynccontextmanager
async def publisher(engines: Engines, done: list[str], *, hashes: bool = True) -> AsyncIterator[Publisher]:
    class Worker(IdleWorker):
        def describe_weights(self) -> StageWeights:
            return StageWeights(0, [[TensorSpec("t", (10,), "float32")]])

        def open_group(self, service: int) -> StageGroup:
            return StageGroup(0, "g", "host", 1, joined=True)

        def hash_weights(self) -> Sent:
            return Sent(0, OURS)

        def send_weights(self, *_: object) -> Sent:
            done.append("send")
            return Sent(0, OURS)

        def keep_weights(self) -> None:
            done.append("keep")

    channel = Channel(0, 1, b"")
    ranks, rollout = RankGroup(channel, Worker(), ThreadPoolExecutor(1)), cast(RolloutClient, engines)
    transport = CollectiveTransport(ranks, seconds=20.0, keeps=True, hashes=hashes)
    yield Publisher(
        ranks, [rollout], transport, PublishSection(), backend="gloo", away_seconds=60.0, devices=OwnDevices()
    )
    await channel.close()


def at(step: int) -> TrainState:
    return TrainState(step=step, policy_version=0, epoch=1)


async def test_weights_that_engines_have_loaded_are_not_sent_but_kept_to_come_back_to() -> None:
    engines, done = Engines(OURS), list[str]()
    async with publisher(engines, done) as publishing:
        await publishing.publish(at(0))
        assert engines.ways == [pb.TRANSPORT_LOADED]
        assert done == ["keep"]
        await publishing.publish(at(1))
    assert engines.ways == [pb.TRANSPORT_LOADED, pb.TRANSPORT_COLLECTIVE]


async def test_others_are_sent_in_the_same_publication() -> None:
    engines = Engines({"t": "another"})
    async with publisher(engines, []) as publishing:
        await publishing.publish(at(0))
    assert engines.ways == [pb.TRANSPORT_LOADED, pb.TRANSPORT_COLLECTIVE]


async def test_what_engines_had_loaded_costs_none_of_the_tries() -> None:
    engines = Engines(OURS, *(Unavailable("no engine is alive") for _ in range(3)))
    async with publisher(engines, []) as publishing:
        await publishing.publish(at(0))
    assert engines.ways == [pb.TRANSPORT_LOADED, *[pb.TRANSPORT_COLLECTIVE] * 3]


@pytest.mark.parametrize(("step", "hashes"), [(3, True), (0, False)])
async def test_trained_weights_and_those_that_cannot_be_compared_are_sent(step: int, hashes: bool) -> None:
    engines = Engines(OURS)
    async with publisher(engines, [], hashes=hashes) as publishing:
        await publishing.publish(at(step))
    assert engines.ways == [pb.TRANSPORT_COLLECTIVE]
