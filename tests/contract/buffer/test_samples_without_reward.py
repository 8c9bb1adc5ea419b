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
from headrace.trajectory import Failure, Sample, Status
from services.buffer.build import train_stream
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore
from tests.support.ledgers.buffer_samples import completed_sample, text_prompts
from tests.support.processes.buffer_server import served_buffer

BY_REWARDS = [
    TrainSection(loss_type="policy_loss", advantage_estimator="ppo"),
    TrainSection(loss_type="policy_loss", advantage_estimator="reinforce_plus_plus"),
    TrainSection(loss_type="policy_loss", advantage_estimator="grpo"),
    TrainSection(loss_type="custom_loss", advantage_estimator="gspo"),
]
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


@pytest.mark.parametrize("train", BY_REWARDS, ids=lambda train: f"{train.loss_type}-{train.advantage_estimator}")
async def test_a_trained_sample_without_a_reward_fails_alone_where_the_job_trains_by_rewards(
    train: TrainSection,
) -> None:
    async with stream_of(job_of(train), MemoryStore()) as client:
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


async def test_samples_of_any_kind_without_a_reward_fail_and_those_that_failed_keep_their_reason(
    tmp_path: Path,
) -> None:
    """None of the group has a reward; the ledger is started again."""
    job = job_of(BY_REWARDS[0])
    async with stream_of(job, SqliteStore(tmp_path)) as client:
        (lease,) = await leased(client, 1)
        samples = [replace(completed_sample(lease, i, 0), reward=None) for i in range(4)]
        samples[1] = replace(samples[1], status=Status.FAILED, failure=Failure("ENGINE_DOWN", "nobody answered"))
        samples[2] = replace(samples[2], loss_mask=samples[2].loss_mask * 0)
        samples[3] = replace(samples[3], status=Status.TRUNCATED)
        await client.put_groups([put_of(lease, samples)])
    async with stream_of(job, SqliteStore(tmp_path)) as client:
        (envelopes,) = await stored(client)
        assert [envelope.status for envelope in envelopes] == [FAILED] * 4
        reasons = [envelope.failure.reason for envelope in envelopes]
        assert reasons == ["NO_REWARD", "ENGINE_DOWN", "NO_REWARD", "NO_REWARD"]
        for sample in await client.fetch_samples("train", [envelope.sample_id for envelope in envelopes]):
            assert Sample.unpack(sample).status is Status.FAILED


async def test_samples_that_fail_for_want_of_a_reward_are_counted_with_the_reason() -> None:
    async with stream_of(job_of(BY_REWARDS[2]), MemoryStore()) as client:
        leases = await leased(client, 2)
        puts = []
        for lease, num_bare in zip(leases, (1, 3), strict=True):
            samples = [completed_sample(lease, i, 0) for i in range(4)]
            puts.append(put_of(lease, [replace(s, reward=None) if s.index < num_bare else s for s in samples]))
        await client.put_groups(puts)
        production = (await client.stats("train")).production
        assert (production.num_samples, production.num_failed, production.num_scored) == (8, 4, 4)
        assert [(one.reason, one.num_samples) for one in production.failures] == [("NO_REWARD", 4)]


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


async def test_a_stream_of_a_client_says_whether_it_needs_rewards() -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        for needs_reward, status in ((True, FAILED), (False, COMPLETED)):
            name = f"train/{needs_reward}"
            config = pb.StreamConfig(name=name, n_samples_per_prompt=1, groups_per_step=1, needs_reward=needs_reward)
            assert (await client.create_stream(config)).config.needs_reward == needs_reward
            await client.submit_prompts(name, text_prompts("a"))
            (lease,) = (await client.lease_groups(name, "p", 1)).leases
            await client.put_groups([put_of(lease, [replace(completed_sample(lease, 0, 0), reward=None)])])
            (group,) = (await client.list_groups(name)).groups
            assert group.samples[0].status == status


async def test_a_ledger_of_an_earlier_release_takes_the_rule_at_its_next_start() -> None:
    store = MemoryStore()
    config = train_stream(job_of(BY_REWARDS[1]))
    async with served_buffer(store) as (buffer, _):
        await buffer.create_stream(replace(config, needs_reward=False))
    async with served_buffer(store) as (buffer, _):
        await buffer.set_limits(config)
        assert await buffer.create_stream(config) == (config, False)
