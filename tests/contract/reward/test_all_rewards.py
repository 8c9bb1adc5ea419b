"""The mean reward of all groups that were scored: a filter's choice is what is trained, not what the policy can do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
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


Made = Callable[[pb.GroupLease], pb.GroupPut]


def dropped(rewards: list[float], message: str = "") -> Made:
    def made(lease: pb.GroupLease) -> pb.GroupPut:
        put = filtered_put(lease, rewards)
        put.failure.message = message
        return put

    return made


def scored_by(name: str) -> Made:
    """`SCORER VERSION`."""

    def made(lease: pb.GroupLease) -> pb.GroupPut:
        put = complete_put(lease)
        for sample in put.samples:
            sample.envelope.scorer, _, sample.envelope.scorer_version = name.partition(" ")
        return put

    return made


async def trained(folder: Path, *steps: Sequence[Made]) -> tuple[RunReport, pb.StreamStats]:
    """A run whose steps are made of these puts, in their order."""
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(CONFIG)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(100))))
        ranks, report = Ranks(num_steps=len(steps)), RunReport(folder)
        console = TrainerConsole(report, EvalScheduler(), run="r", num_steps=len(steps), groups_per_step=2)
        console.open(ranks, 1)

        async def produce() -> None:
            for made in (made for step in steps for made in step):
                (lease,) = (await client.lease_groups("train", "p", 1, wait_seconds=60.0)).leases
                await client.put_groups([made(lease)])

        ledger = StreamLedger(client, "train", console, FailureBudget(1.0, 32))
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            tasks.create_task(train(ledger, ranks, console, ranks))
        return report, await client.stats("train")


async def test_a_step_reports_the_mean_of_all_that_was_scored_for_it(tmp_path: Path) -> None:
    whole = [complete_put] * 2
    await trained(tmp_path, [dropped([0.0] * 4)] * 2 + whole, whole, [dropped([0.0] * 4)] * 6 + whole)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["reward/all/mean"], row["reward/all/count"]) for row in rows] == [(0.5, 16), (1.0, 8), (0.25, 32)]


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        (
            [([1.0] * 4, "all rewards are 1.0"), ([0.0] * 4, "all rewards are 0.0"), ([1.0] * 4, "all rewards are 1")],
            "skipped 12 of 20 samples: 8 all right, 4 all wrong",
        ),
        (
            [([0.0] * 4, "too short"), ([0.0, 1.0, 0.0, 1.0], "filter.py:f dropped it")],
            'skipped 8 of 16 samples: 4 "filter.py:f dropped it", 4 "too short"',
        ),
    ],
)
async def test_what_a_filter_skipped_is_said_once_a_step_as_what_it_is(
    tmp_path: Path, skipped: list[tuple[list[float], str]], told: str
) -> None:
    """Each dropped group has its rewards and what its filter said; before and after its step none is dropped."""
    whole = [complete_put] * 2
    report, stats = await trained(tmp_path, whole, [*(dropped(*each) for each in skipped), *whole], whole)
    view = view_of(Job.model_validate({"model": {"hf_checkpoint": "/none"}}))
    for row in report.rows():
        view.on_progress(trainer_pb2.WatchProgressResponse(step=row.step, metrics=row.metrics))
    view.on_stats(stats)
    (line,) = [line for line in view.unread() if "dynamic sampling" in line or "FILTERED" in line]
    assert line.startswith("step 2/")
    assert told in line


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
    """Each step has two groups, by one scorer or by two."""
    pairs = [(names.split("|") * 2)[:2] for names in scorers]
    await trained(tmp_path, *([scored_by(name) for name in pair] for pair in pairs))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each for row in rows if "marks" in row for each in (row["step"], *row["marks"])] == told


async def test_a_step_counts_the_samples_that_each_scorer_paid_for(tmp_path: Path) -> None:
    await trained(tmp_path, [scored_by("custom /a/f.py:f 1b"), scored_by("math 1")], [scored_by("math 1")] * 2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    paid = [{name: row[name] for name in row if name.startswith("samples/scored_by/")} for row in rows]
    custom, math = "samples/scored_by/custom f.py:f 1b", "samples/scored_by/math 1"
    assert paid == [{custom: 4, math: 4}, {math: 8}]


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
