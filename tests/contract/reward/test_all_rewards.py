"""The mean reward of all groups that were scored: a filter's choice is what is trained, not what the policy can do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.trainer.v1 import trainer_pb2
from headrace.client.buffer import BufferClient
from headrace.errors import InvalidArgument
from headrace.job.schema.job import Job
from headrace.limits import MAX_SAMPLES_PER_GROUP
from services.buffer.store.memory import MemoryStore
from services.trainer.failure_budget import AllRewards, FailureBudget
from services.trainer.ledger import StreamLedger
from services.trainer.loop import train
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from tests.contract.test_runs_that_cannot_learn import Ranks
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import served_buffer
from tests.support.run_views import view_of

CONFIG = pb.StreamConfig(name="train", n_samples_per_prompt=4, groups_per_step=2, max_staleness=0)


def filtered_put(lease: pb.GroupLease, rewards: list[float]) -> pb.GroupPut:
    put = failed_put(lease, "FILTERED")
    put.outcome = pb.PUT_OUTCOME_DROPPED
    put.rewards.extend(rewards)
    return put


async def test_a_step_reports_the_mean_of_all_that_was_scored_for_it(tmp_path: Path) -> None:
    dropped_before_each_step = [2, 0, 6]
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(CONFIG)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(100))))
        ranks, report = Ranks(num_steps=3), RunReport(tmp_path)
        console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=3, groups_per_step=2)
        console.open(ranks, 1)

        async def produce() -> None:
            for dropped in dropped_before_each_step:
                for number in range(dropped + 2):
                    (lease,) = (await client.lease_groups("train", "p", 1, wait_seconds=60.0)).leases
                    await client.put_groups(
                        [complete_put(lease) if number >= dropped else filtered_put(lease, [0.0] * 4)]
                    )

        ledger = StreamLedger(client, "train", console, FailureBudget(1.0, 32))
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            tasks.create_task(train(ledger, ranks, console, ranks))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["reward/all/mean"], row["reward/all/count"]) for row in rows] == [(0.5, 16), (1.0, 8), (0.25, 32)]


@pytest.mark.parametrize(
    ("dropped", "told"),
    [
        (
            [([1.0] * 4, "all rewards are 1.0"), ([0.0] * 4, "all rewards are 0.0"), ([1.0] * 4, "all rewards are 1")],
            "skipped 12 of 20 samples: 8 all right, 4 all wrong",
        ),
        ([([-1.0] * 4, "all rewards are -1.0")] * 5, "skipped 20 of 28 samples: 20 all wrong"),
        (
            [([0.0] * 4, "too short"), ([0.0, 1.0, 0.0, 1.0], "filter.py:f dropped it")],
            'skipped 8 of 16 samples: 4 "filter.py:f dropped it", 4 "too short"',
        ),
        ([], None),
    ],
)
async def test_what_a_filter_skipped_is_said_once_a_step_as_what_it_is(
    tmp_path: Path, dropped: list[tuple[list[float], str]], told: str | None
) -> None:
    """Each dropped group has its rewards and what its filter said; before and after its step none is dropped."""
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(CONFIG)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(100))))
        ranks, report = Ranks(num_steps=3), RunReport(tmp_path)
        console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=3, groups_per_step=2)
        console.open(ranks, 1)

        async def produce() -> None:
            for some in ([], dropped, []):
                for each in (*some, None, None):
                    (lease,) = (await client.lease_groups("train", "p", 1, wait_seconds=60.0)).leases
                    put = complete_put(lease) if each is None else filtered_put(lease, each[0])
                    if each is not None:
                        put.failure.message = each[1]
                    await client.put_groups([put])

        ledger = StreamLedger(client, "train", console, FailureBudget(1.0, 32))
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            tasks.create_task(train(ledger, ranks, console, ranks))
        view = view_of(Job.model_validate({"model": {"hf_checkpoint": "/none"}}))
        for row in report.rows():
            view.on_progress(trainer_pb2.WatchProgressResponse(step=row.step, metrics=row.metrics))
        view.on_stats(await client.stats("train"))
    lines = [line for line in view.unread() if "dynamic sampling" in line or "FILTERED" in line]
    assert len(lines) == (1 if told else 0), lines
    assert told is None or (lines[0].startswith("step 2/") and told in lines[0])


@pytest.mark.parametrize(
    ("scorers", "told"),
    [
        (["f1 1", "f1 1", "math 1", "math 1"], [3, "scorer f1 -> math"]),
        (["custom a.py:f 1b", "custom a.py:f 9d", "custom a.py:f 9d"], [2, "scorer custom a.py:f 1b -> a.py:f 9d"]),
        (["f1 1|math 1", "math 1|f1 1", "f1 1|math 1", "math 1"], []),
    ],
)
async def test_a_step_whose_samples_another_scorer_scored_is_marked(
    tmp_path: Path, scorers: list[str], told: list[object]
) -> None:
    """Each step has two groups, each with `SCORER VERSION`."""
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(CONFIG)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(100))))
        ranks, report = Ranks(num_steps=len(scorers)), RunReport(tmp_path)
        console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=len(scorers), groups_per_step=2)
        console.open(ranks, 1)

        async def produce() -> None:
            for names in scorers:
                first, _, second = names.partition("|")
                for name in (first, second or first):
                    (lease,) = (await client.lease_groups("train", "p", 1, wait_seconds=60.0)).leases
                    put = complete_put(lease)
                    for sample in put.samples:
                        sample.envelope.scorer, _, sample.envelope.scorer_version = name.partition(" ")
                    await client.put_groups([put])

        ledger = StreamLedger(client, "train", console, FailureBudget(1.0, 32))
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            tasks.create_task(train(ledger, ranks, console, ranks))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each for row in rows if "marks" in row for each in (row["step"], *row["marks"])] == told


@pytest.mark.parametrize("rewards", [[float("nan")], [1e300], [0.0] * (MAX_SAMPLES_PER_GROUP + 1)])
async def test_rewards_that_no_sample_may_have_are_refused(rewards: list[float]) -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(CONFIG)
        await client.submit_prompts("train", text_prompts("a"))
        (lease,) = (await client.lease_groups("train", "p", 1)).leases
        with pytest.raises(InvalidArgument, match="groups.rewards"):
            await client.put_groups([filtered_put(lease, rewards)])
        assert (await client.stats("train")).production.num_samples == 0


def reading(num_scored: int, reward_sum: float, epoch: int = 1) -> pb.StreamStats:
    production = pb.Production(num_samples=num_scored, num_scored=num_scored, reward_sum=reward_sum)
    return pb.StreamStats(epoch=epoch, production=production)


def test_a_restart_of_the_trainer_or_of_the_buffer_takes_no_sample_twice() -> None:
    rewards = AllRewards()
    assert rewards.since(reading(8, 8.0, epoch=2)) == {}, "an earlier trainer has reported these"
    assert rewards.since(reading(12, 10.0, epoch=2)) == {"reward/all/mean": 0.5, "reward/all/count": 4.0}
    assert rewards.since(reading(12, 10.0, epoch=2)) == {}
    assert rewards.since(reading(2, 2.0, epoch=2)) == {"reward/all/mean": 1.0, "reward/all/count": 2.0}
