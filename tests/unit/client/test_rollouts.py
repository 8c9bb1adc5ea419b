"""Several rollout services are asked as one: by the first that answers, or all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.rollout.v1 import rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.client import rollout
from headrace.client.open import open_rollout
from headrace.client.rollout import Rollout, RolloutClient
from headrace.errors import InvalidArgument, NotFound, Unavailable
from headrace.rpc.net import free_port
from headrace.rpc.server import RpcServer, Service
from headrace.trajectory import pack_column

NAME = pb.DESCRIPTOR.services_by_name["RolloutService"].full_name
GONE = f"127.0.0.1:{free_port()}"


class OneService(rollout_pb2_grpc.RolloutServiceServicer):
    """Says what it is told, and remembers what it was told; `ends_after` messages it is gone."""

    def __init__(self, version: int = 0, in_flight: int = 0, ends_after: int | None = None, ready: bool = True) -> None:
        self.heard: list[str] = []
        self._ends_after = ends_after
        state = pb.ENGINE_STATE_READY if ready else pb.ENGINE_STATE_STARTING
        self._fleet = pb.GetFleetResponse(
            engines=[pb.Engine(engine_id="engine-0", state=state)],
            policy_version=version,
            samples_in_flight=in_flight,
            groups_produced=10,
            warnings=["look at this"],
        )

    async def GetFleet(self, request: pb.GetFleetRequest, context: Any) -> pb.GetFleetResponse:
        return self._fleet

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.heard.append("generate")
        begun = request.begun.shape[0] if request.HasField("begun") else 0
        for number in range(begun, 3):
            if number == self._ends_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            status = sample_pb2.SAMPLE_STATUS_COMPLETED if number == 2 else sample_pb2.SAMPLE_STATUS_UNSPECIFIED
            tokens = pack_column("tokens", np.array([number], np.int32)) if request.return_tokens else None
            yield pb.GenerateResponse(text=str(number), tokens=tokens, status=status)

    async def PauseProduction(self, request: pb.PauseProductionRequest, context: Any) -> pb.PauseProductionResponse:
        self.heard.append("pause")
        return pb.PauseProductionResponse(samples_in_flight=self._fleet.samples_in_flight)

    async def ResumeProduction(self, request: pb.ResumeProductionRequest, context: Any) -> pb.ResumeProductionResponse:
        self.heard.append("resume")
        return pb.ResumeProductionResponse()

    async def SetReward(self, request: pb.SetRewardRequest, context: Any) -> pb.SetRewardResponse:
        self.heard.append(request.scorer)
        if self._fleet.policy_version:
            raise NotFound("no such scorer here")
        return pb.SetRewardResponse(scorer=request.scorer)


@asynccontextmanager
async def asked_as_one(services: Sequence[OneService], *others: str) -> AsyncIterator[Rollout]:
    async with AsyncExitStack() as stack:
        addresses = []
        for each in services:
            server = RpcServer(
                "rollout",
                "127.0.0.1:0",
                [Service(each, rollout_pb2_grpc.add_RolloutServiceServicer_to_server, NAME)],
            )
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
            addresses.append(server.address)
        client = open_rollout(",".join([*others, *addresses]), deadline_seconds=0.5)
        yield await stack.enter_async_context(client)


async def text_of(client: Rollout, **request: Any) -> str:
    replies = client.generate(pb.GenerateRequest(**request), deadline_seconds=5.0)
    return "".join([reply.text async for reply in replies if not reply.HasField("tokens")])


async def test_the_fleet_is_that_of_all_services_that_answer_and_says_which_one_does_not() -> None:
    async with asked_as_one([OneService(version=3, in_flight=2), OneService(version=4)], GONE) as client:
        fleet = await client.get_fleet()
    assert [engine.engine_id for engine in fleet.engines] == ["rollout-1/engine-0", "rollout-2/engine-0"]
    assert (fleet.policy_version, fleet.samples_in_flight, fleet.groups_produced) == (4, 2, 20)
    assert list(fleet.warnings) == ["look at this", "rollout-0 does not answer"]


async def test_the_newest_version_answers_and_of_equals_the_one_with_less_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "_ANSWER_SECONDS", 0.5)
    old, busy, idle, starting = (
        OneService(1), OneService(2, in_flight=9), OneService(2), OneService(5, ready=False)
    )  # fmt: skip
    async with asked_as_one([old, busy, idle, starting], GONE) as client:
        assert await text_of(client) == "012"
    assert [each.heard for each in (old, busy, idle, starting)] == [[], [], ["generate"], []]


async def test_a_response_goes_on_at_another_service_where_its_own_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "_ANSWER_SECONDS", 0.5)
    gone, well = OneService(2, ends_after=0), OneService(1)
    async with asked_as_one([gone, well]) as client:
        assert await text_of(client) == "012"
        assert (gone.heard, well.heard) == (["generate"], ["generate"])
    async with asked_as_one([OneService(2, ends_after=1), well]) as client:
        with pytest.raises(Unavailable, match="gone"):
            await text_of(client, sampling=sample_pb2.SamplingParams(regex="[0-9]*"))
    async with asked_as_one([OneService(2, ends_after=2), OneService(2, ends_after=2), well]) as client:
        services = client.services
        response = client.generate(pb.GenerateRequest())
        said = [(await anext(response)).text, (await anext(response)).text]
        client.services = services[2:]
        assert [*said, *[reply.text async for reply in response]] == ["0", "1", "2"]


async def test_production_is_paused_at_all_of_them_and_one_that_is_away_is_named() -> None:
    services = [OneService(in_flight=1), OneService(in_flight=2)]
    async with asked_as_one(services) as client:
        assert await client.pause_production() == 3
        await client.resume_production()
        assert (await client.set_reward(scorer="math")).scorer == "math"
    async with asked_as_one(services, GONE) as client:
        with pytest.raises(Unavailable, match=f"{GONE} .*; production is paused at 2 of 3 rollout services: repeat it"):
            await client.pause_production()
    assert [each.heard for each in services] == [["pause", "resume", "math", "pause"]] * 2


async def test_one_address_is_one_service_and_an_address_twice_is_a_mistake() -> None:
    async with open_rollout("127.0.0.1:1") as client:
        assert isinstance(client, RolloutClient)
        assert client.services == [client]
    with pytest.raises(InvalidArgument, match="an address twice"):
        open_rollout("a:1,a:1")
