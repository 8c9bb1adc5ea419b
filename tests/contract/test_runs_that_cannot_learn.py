"""A trainer's loop over a real buffer whose producers bring nothing but failures: it ends, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.trajectory import Status
from services.buffer.store.memory import MemoryStore
from services.trainer.failure_budget import FailureBudget
from services.trainer.ledger import StreamLedger
from services.trainer.loop import train
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import EvalScheduler
from services.trainer.serving.report import RunReport
from tests.support.ledgers.buffer_samples import complete_put, failed_put, text_prompts
from tests.support.processes.buffer_server import served_buffer
from tests.unit.trainer.test_loop import Everything

N_SAMPLES = 4


class Ranks(Everything):
    """Trains nothing, saves nothing."""

    def checkpoint_path(self, step: int) -> Path:
        return Path(f"/checkpoints/{step}")

    async def export_to(self, path: Path) -> None:
        self.diary.append(f"export_to {path}")


def dropped_put(lease: pb.GroupLease) -> pb.GroupPut:
    put = failed_put(lease, "PROMPT_TOO_LONG")
    put.outcome = pb.PUT_OUTCOME_DROPPED
    return put


def half_scored_put(lease: pb.GroupLease) -> pb.GroupPut:
    """Three of four samples have no score."""
    put = complete_put(lease)
    for sample in put.samples[1:]:
        sample.envelope.ClearField("reward")
        sample.envelope.status = Status.FAILED.number
        sample.envelope.failure.CopyFrom(sample_pb2.Failure(reason="REWARD_HOOK_RAISED", message="KeyError: 'answer'"))
    return put


async def outcome(folder: Path, put_of: Callable[[pb.GroupLease], pb.GroupPut]) -> tuple[TrainerConsole, Ranks]:
    """The console and the ranks of a run of 1,000 steps that ends by its failure_budget."""
    config = pb.StreamConfig(
        name="train", n_samples_per_prompt=N_SAMPLES, groups_per_step=2, max_staleness=0, max_attempts=3
    )
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts(*(str(number) for number in range(1_000))))
        ranks = Ranks(num_steps=1_000)
        console = TrainerConsole(RunReport(folder), EvalScheduler(), run="r", num_steps=1_000, groups_per_step=2)
        console.open(ranks, 1)

        async def produce() -> None:
            while True:
                leases = (await client.lease_groups("train", "p", 8, wait_seconds=1.0)).leases
                if leases:
                    await client.put_groups([put_of(lease) for lease in leases])

        producing = asyncio.create_task(produce())
        try:
            async with asyncio.timeout(120):
                await train(StreamLedger(client, "train", console, FailureBudget(0.5, 32)), ranks, console, ranks)
        finally:
            producing.cancel()
    return console, ranks


@pytest.mark.parametrize(
    ("put_of", "said"),
    [
        (lambda lease: failed_put(lease, "HOOK_RAISED"), "HOOK_RAISED: nobody answered (e.g. group train/"),
        (half_scored_put, "REWARD_HOOK_RAISED: KeyError: 'answer' (e.g. group train/"),
        (dropped_put, "PROMPT_TOO_LONG: nobody answered (e.g. group train/"),
    ],
    ids=["every group fails", "most samples have no score", "every prompt is dropped"],
)
async def test_a_run_that_cannot_learn_ends_with_the_reason(
    tmp_path: Path, put_of: Callable[[pb.GroupLease], pb.GroupPut], said: str
) -> None:
    console, _ = await outcome(tmp_path, put_of)
    assert console.verdict is not None
    assert said in console.verdict
    assert console.leaving  # a finished run's export is not written


async def test_the_buffer_counts_failures_drops_and_returns_by_their_reasons() -> None:
    config = pb.StreamConfig(name="train", n_samples_per_prompt=N_SAMPLES, groups_per_step=2)
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts("a", "b", "c", "d", "e"))
        leases = (await client.lease_groups("train", "p", 5)).leases
        await client.put_groups([complete_put(leases[0]), half_scored_put(leases[1]), failed_put(leases[2])])
        await client.put_groups([dropped_put(leases[3]), failed_put(leases[2])])  # a repeated put counts once
        await client.release_leases([pb.LeaseRelease(lease_id=leases[4].lease_id, reason="UNAVAILABLE: no engine")])
        production = (await client.stats("train")).production
    assert (production.num_samples, production.num_failed, production.num_dropped) == (16, 7, 4)
    assert {count.reason: count.num_samples for count in production.failures} == {
        "ENGINE_DOWN": 4,
        "REWARD_HOOK_RAISED": 3,
        "PROMPT_TOO_LONG": 4,
    }
    assert (production.num_groups_returned, production.last_return) == (1, "UNAVAILABLE: no engine")
    example = next(count for count in production.failures if count.reason == "REWARD_HOOK_RAISED")
    assert (example.example, example.group_id) == ("KeyError: 'answer'", leases[1].group_id)
