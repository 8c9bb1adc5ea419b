"""Finished samples whose scorer is unreachable: the ledger holds them, and they are scored without generating again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.reward.v1 import reward_pb2
from headrace.client.buffer import BufferClient
from headrace.trajectory import Sample, Status
from services.buffer.store.memory import MemoryStore
from services.rollout.production import groups
from services.rollout.production.partial import AWAITS_SCORE, PartialRollout, unscored
from services.rollout.production.producer import BufferLedger, Producer
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import Answer, score, scripted_reward
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.support.processes.buffer_server import served_buffer
from tests.unit.rollout.production.test_production import production


@pytest.fixture(autouse=True)
def stored_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_STORED_AFTER_SECONDS", 0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def unreachable(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
    error = reward_pb2.ScoreError(reason="SCORER_UNAVAILABLE", message="the judge is away", retryable=True)
    return reward_pb2.ScoreResult(item_id=item.item_id, error=error)


async def stored(folder: Path, answer: Answer = unreachable) -> buffer_pb2.LeaseRelease:
    """What a producer releases whose scorer is unreachable; it is drained, as if it were killed, after that."""
    ledger = MemoryLedger([lease(0)])
    async with production(folder, ledger, answer) as made:
        await made.fakes.until(lambda: len(ledger.releases) == 1)
        assert made.fakes.fake(0).num_tokens == 24
    assert ledger.puts == []
    return ledger.releases[0]


def leased_again(release: buffer_pb2.LeaseRelease) -> buffer_pb2.GroupLease:
    again = lease(0)
    again.partial_samples.extend(release.partial_samples)
    return again


@pytest.mark.parametrize("partial_rollout", [None, PartialRollout(mask_offpolicy=False, max_staleness=1)])
async def test_they_are_stored_once_and_scored_by_the_next_producer_without_generating(
    folder: Path, partial_rollout: PartialRollout | None
) -> None:
    release = await stored(folder)
    before = [Sample.unpack(packed) for packed in release.partial_samples]
    assert all(each.reward is None and AWAITS_SCORE in each.hook_fields for each in before)

    ledger = MemoryLedger([leased_again(release)])
    answers = {"answer": unreachable}
    async with production(
        folder, ledger, lambda item: answers["answer"](item), partial_rollout=partial_rollout
    ) as made:
        await made.fakes.until(lambda: len(made.reward.asked) > 3)  # it waits, and holds its lease
        assert (ledger.puts, ledger.releases) == ([], [])
        answers["answer"] = score(0.5)
        await made.fakes.until(lambda: len(ledger.puts) == 1)
        assert made.fakes.fake(0).num_tokens == 0
    samples = [Sample.unpack(packed) for packed in ledger.puts[0].samples]
    assert [each.reward for each in samples] == [0.5] * 3
    assert [each.tokens.tolist() for each in samples] == [each.tokens.tolist() for each in before]
    assert not any(AWAITS_SCORE in each.hook_fields for each in samples)


async def test_so_they_are_when_the_service_itself_cannot_be_reached(folder: Path) -> None:
    ledger = MemoryLedger([lease(0)])
    async with production(folder, ledger, score(1.0)) as made:
        await made.scorer.retarget(address="127.0.0.1:9", scorer=None)
        await made.fakes.until(lambda: len(ledger.releases) == 1)
        ledger.queued.append(leased_again(ledger.releases[0]))
        async with scripted_reward(score(0.25)) as other:
            await made.scorer.retarget(address=other.address, scorer=None)
            await made.fakes.until(lambda: len(ledger.puts) == 1)
    assert ledger.puts[0].samples[0].envelope.reward == 0.25


async def test_the_ledger_holds_them_when_their_producer_is_killed_while_it_waits(folder: Path) -> None:
    config = buffer_pb2.StreamConfig(name="train", n_samples_per_prompt=3, groups_per_step=1, lease_seconds=0.5)
    answers = {"answer": unreachable}
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(config)
        await client.submit_prompts("train", text_prompts("hello"))
        ledger = BufferLedger(client, "train", wait_seconds=0.2)
        async with production(folder, cast(MemoryLedger, ledger), lambda item: answers["answer"](item)) as made:
            await made.fakes.until(lambda: len(made.reward.asked) > 30)  # stored, leased again, and waiting
            await kill(made.producer)
        assert (await client.stats("train")).groups["LEASED"] == 1
        answers["answer"] = score(0.75)
        async with production(folder, cast(MemoryLedger, ledger), lambda item: answers["answer"](item)) as made:
            await made.fakes.until(lambda: made.metrics.groups_produced == 1)
            assert made.fakes.fake(0).num_tokens == 0
        stats = await client.stats("train")
    assert (stats.groups["READY"], stats.groups["LEASED"]) == (1, 0)


async def kill(producer: Producer) -> None:
    """It renews and releases nothing from now on."""
    tasks = [*producer._tasks, *(group.work for group in producer._groups.values())]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_samples_that_wait_too_long_fail_with_the_reason(folder: Path) -> None:
    again = leased_again(await stored(folder))
    ledger = MemoryLedger([again])
    async with production(folder, ledger, unreachable, patience=0.01) as made:
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    put = ledger.puts[0]
    assert (put.outcome, put.failure.reason) == (buffer_pb2.PUT_OUTCOME_FAILED, "SCORER_UNAVAILABLE")
    assert "judge is away" in put.failure.message


async def test_a_group_that_the_ledger_would_not_hold_waits_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.production.partial.MAX_PARTIAL_BYTES", 10)
    ledger = MemoryLedger([lease(0)])
    answers = {"answer": unreachable}
    async with production(folder, ledger, lambda item: answers["answer"](item)) as made:
        await made.fakes.until(lambda: len(made.reward.asked) > 9)
        answers["answer"] = score(1.0)
        await made.fakes.until(lambda: len(ledger.puts) == 1)
    assert ledger.releases == []


async def test_only_a_whole_group_of_finished_samples_is_taken(folder: Path) -> None:
    again = leased_again(await stored(folder))
    samples, since = unscored(again) or ([], 0.0)
    assert len(samples) == 3
    assert since > 0
    assert {each.status for each in samples} == {Status.TRUNCATED}
    again.partial_samples.pop()  # not a whole group
    assert unscored(again) is None
    assert unscored(lease(1)) is None
