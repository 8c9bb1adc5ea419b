"""Flags of a publication act: on what a rank sends, on what the rollout service is asked, and on who is waited for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded
from headrace.job.schema.job import Job
from services.trainer.control.channel import Control
from services.trainer.control.commands import Command, OpenGroups, SendWeights
from services.trainer.control.crew import Crew
from services.trainer.control.publication import Publisher
from services.trainer.control.rank import sender_of
from services.trainer.control.sender import WeightSender
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from services.trainer.state import TrainState
from services.trainer.weights.buckets import TensorSpec
from services.trainer.weights.canary import Canary

STATE = TrainState(step=1, policy_version=0, epoch=1)
CANARY = Canary(tokens=[1, 2], log_probs=[-0.5])


class SmallPolicy:
    """Four tensors of 40 bytes."""

    def canary(self) -> Canary:
        return CANARY

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(f"t{number}", (10,), "float32") for number in range(4)]

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((spec.name, torch.zeros(10)) for spec in self.hf_tensor_specs())


class AskedRollout:
    """Takes part in publications of nothing, and remembers how it was asked."""

    def __init__(self) -> None:
        self.begun: list[pb.BeginPublishRequest] = []
        self.deadlines: list[float] = []

    async def begin_publish(
        self, request: pb.BeginPublishRequest, *, deadline_seconds: float
    ) -> pb.BeginPublishResponse:
        self.begun.append(request)
        self.deadlines.append(deadline_seconds)
        return pb.BeginPublishResponse(world_size=2)

    async def commit_publish(self, *_: object, canary: pb.Canary, deadline_seconds: float) -> pb.CommitPublishResponse:
        self.deadlines.append(deadline_seconds)
        return pb.CommitPublishResponse()

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        pass


class OnlyRank:
    """A crew whose sender has no stage: it puts the canary, or hangs before that."""

    def __init__(self, control: Control, *, hangs: bool) -> None:
        self._control = control
        self._hangs = hangs

    async def run(self, command: Command) -> dict[str, float]:
        if isinstance(command, OpenGroups) and not self._hangs:
            self._control.put(f"{command.publication_id}/canary", json.dumps(asdict(CANARY)))
        return {}


@pytest.fixture
def control() -> Iterator[Control]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Control(0, torch.device("cpu"))
    dist.destroy_process_group()


def job_of(**publish: Any) -> Job:
    services = {"rollout_address": "127.0.0.1:1"}
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services, "publish": publish})


def sender_in(control: Control, **publish: Any) -> WeightSender:
    layout = SimpleNamespace(device=torch.device("cpu"), pp_rank=0, tp_rank=0, dp_rank=0)
    return sender_of(job_of(**publish), cast(Policy, SmallPolicy()), cast(Layout, layout), control)


def publisher_of(control: Control, rollout: AskedRollout, *, hangs: bool = False, **publish: Any) -> Publisher:
    crew = cast(Crew, OnlyRank(control, hangs=hangs))
    client = cast(RolloutClient, rollout)
    return Publisher(crew, control, client, job_of(**publish).publish, stages=0, backend="gloo")


@pytest.mark.parametrize(("update_weight_buffer_size", "sizes"), [(80, [2, 2]), (100_000, [4]), (1, [1, 1, 1, 1])])
def test_update_weight_buffer_size_bounds_what_travels_at_once(
    control: Control, update_weight_buffer_size: int, sizes: list[int]
) -> None:
    sender = sender_in(control, update_weight_buffer_size=update_weight_buffer_size)
    sender.open("v1")
    assert [len(bucket) for bucket in json.loads(control.get("v1/stage/0"))["buckets"]] == sizes
    sender.drop()


def test_after_update_weight_timeout_seconds_a_sender_gives_up_engines_that_do_not_come(control: Control) -> None:
    sender = sender_in(control, update_weight_timeout_seconds=0.2)
    sender.open("v1")
    sender.send(SendWeights("v1", world_size=2))
    assert "error" in json.loads(control.get("v1/sent/0"))
    sender.drop()


async def test_after_update_weight_timeout_seconds_a_rank_that_hangs_ends_the_publication(control: Control) -> None:
    publisher = publisher_of(control, AskedRollout(), hangs=True, update_weight_timeout_seconds=0.05)
    with pytest.raises(DeadlineExceeded, match="the rank that hangs"):
        await publisher.publish(STATE)


async def test_the_rollout_service_is_told_the_transport_and_update_weight_timeout_seconds(control: Control) -> None:
    rollout = AskedRollout()
    publisher = publisher_of(control, rollout, update_weight_transport="collective", update_weight_timeout_seconds=7.0)
    await publisher.publish(STATE)
    (begun,) = rollout.begun
    assert (begun.transport, begun.deadline_seconds) == (pb.TRANSPORT_COLLECTIVE, 7.0)
    assert rollout.deadlines == [7.0, 7.0]
