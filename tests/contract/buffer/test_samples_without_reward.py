"""A stream whose job trains by rewards: a sample without one fails alone, and no other sample of the call does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.job.schema.production import RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.job.schema.training import DistillationSection, TrainSection
from headrace.trajectory import Sample, Status
from services.buffer.build import train_stream
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer

BY_REWARDS = TrainSection(loss_type="policy_loss", advantage_estimator="grpo")
FAILED, COMPLETED, TRUNCATED = (
    sample_pb2.SAMPLE_STATUS_FAILED,
    sample_pb2.SAMPLE_STATUS_COMPLETED,
    sample_pb2.SAMPLE_STATUS_TRUNCATED,
)


def job_of(train: TrainSection, distillation: DistillationSection | None = None) -> Job:
    return Job(
        model=ModelSection(hf_checkpoint=Path("/none")),
        rollout=RolloutSection(rollout_batch_size=2, n_samples_per_prompt=4),
        train=train,
        distillation=distillation or DistillationSection(),
    )


@asynccontextmanager
async def stream_of(job: Job, store: MemoryStore | SqliteStore) -> AsyncIterator[BufferClient]:
    async with served_buffer(store) as (buffer, server), BufferClient(server.address) as client:
        await buffer.create_stream(train_stream(job))
        yield client


def put_of(lease: pb.GroupLease, samples: list[Sample]) -> pb.GroupPut:
    packed = [sample.pack() for sample in samples]
    return pb.GroupPut(
        lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=packed
    )


async def leased(client: BufferClient, count: int) -> list[pb.GroupLease]:
    await client.submit_prompts("train", text_prompts(*(f"{i}" for i in range(count))))
    return list((await client.lease_groups("train", "p", count)).leases)


async def stored(client: BufferClient) -> list[list[sample_pb2.SampleEnvelope]]:
    groups = sorted((await client.list_groups("train")).groups, key=lambda group: group.group_id)
    assert {group.state for group in groups} == {pb.GROUP_STATE_READY}
    return [list(group.samples) for group in groups]


async def test_a_trained_sample_without_a_reward_fails_alone_where_the_job_trains_by_rewards() -> None:
    async with stream_of(job_of(BY_REWARDS), MemoryStore()) as client:
        first, second = await leased(client, 2)
        ok, bare, zero, cut = (completed_sample(first, i, 0) for i in range(4))
        bare, zero = replace(bare, reward=None), replace(zero, reward=0.0)
        cut = replace(cut, reward=None, status=Status.TRUNCATED)
        whole = [completed_sample(second, i, 0) for i in range(4)]
        results = await client.put_groups([put_of(first, [ok, bare, zero, cut]), put_of(second, whole)])
        assert [result.state for result in results] == [pb.GROUP_STATE_READY] * 2
        envelopes, others = await stored(client)
        assert [envelope.status for envelope in envelopes] == [COMPLETED, FAILED, COMPLETED, FAILED]
        assert [envelope.failure.reason for envelope in envelopes] == ["", "NO_REWARD", "", "NO_REWARD"]
        assert [envelope.HasField("reward") for envelope in envelopes] == [True, False, True, False]
        assert [envelope.status for envelope in others] == [COMPLETED] * 4
        (again,) = await client.put_groups([put_of(first, [ok, bare, zero, cut])])
        assert again.duplicate


@pytest.mark.parametrize(
    ("train", "distillation"),
    [
        (TrainSection(loss_type="sft_loss"), DistillationSection()),
        (TrainSection(), DistillationSection(use_opd=True, opd_teacher_url="http://127.0.0.1:1")),
        (
            TrainSection(advantage_estimator="ppo"),
            DistillationSection(use_opd=True, opd_type="megatron", opd_teacher_load=Path("/none")),
        ),
    ],
    ids=["sft", "opd-sglang", "opd-megatron"],
)
async def test_supervised_and_distilled_samples_need_no_reward(
    train: TrainSection, distillation: DistillationSection
) -> None:
    async with stream_of(job_of(train, distillation), MemoryStore()) as client:
        (lease,) = await leased(client, 1)
        samples = [replace(completed_sample(lease, i, 0), reward=None) for i in range(4)]
        samples[3] = replace(samples[3], status=Status.TRUNCATED)
        await client.put_groups([put_of(lease, samples)])
        (envelopes,) = await stored(client)
        assert [envelope.status for envelope in envelopes] == [COMPLETED, COMPLETED, COMPLETED, TRUNCATED]
