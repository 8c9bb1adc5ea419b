"""Groups that no step can train any more: what a producer does when the ledger says so."""

from __future__ import annotations

from pathlib import Path

from services.rollout.engine.api import SamplingParams
from services.rollout.production.partial import PartialRollout
from tests.support.fakes.memory_ledger import MemoryLedger, lease
from tests.support.fakes.scripted_reward import score
from tests.unit.rollout.production.test_production import production, tokenizer_folder

__all__ = ["tokenizer_folder"]

ENDLESS = SamplingParams(max_new_tokens=5000)


async def test_work_on_groups_that_are_too_old_for_every_open_step_ends_at_once(tokenizer_folder: Path) -> None:
    ledger = MemoryLedger([lease(0, policy_version=0), lease(1, policy_version=3)])
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=ENDLESS, max_groups_in_flight=3
    ) as made:
        made.fakes.fleet.weights.switch_to(3)
        await made.fakes.until(lambda: made.fakes.fake(0).num_in_flight == 6)
        ledger.oldest_version = 3
        await made.fakes.until(lambda: bool(ledger.released))
        await made.fakes.until(lambda: made.fakes.fake(0).num_in_flight == 3)  # the engine is free of them
        assert (ledger.released, list(made.producer._groups)) == (["lease-0"], ["lease-1"])
        ledger.queued.append(lease(2, policy_version=3))  # and its place is another's
        await made.fakes.until(lambda: "lease-2" in made.producer._groups)
    assert "every step that could train it has its batch" in ledger.releases[0].reason
    assert ledger.puts == []


async def test_where_old_tokens_are_masked_a_group_comes_back_with_them_and_the_next_lease_goes_on(
    tokenizer_folder: Path,
) -> None:
    ledger = MemoryLedger([lease(0)])
    partial = PartialRollout(mask_offpolicy=True, max_staleness=0)
    params = SamplingParams(max_new_tokens=100)
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=params, partial_rollout=partial
    ) as made:
        await made.fakes.until(lambda: made.fakes.fake(0).num_tokens > 30)
        ledger.oldest_version = 1
        await made.fakes.until(lambda: bool(ledger.released))
        await made.fakes.name_weights(0, 1)
        made.fakes.fleet.weights.switch_to(1)
        begun = ledger.releases[0].partial_samples
        assert all(sample.envelope.response_tokens for sample in begun)
        again = lease(2, policy_version=1)
        again.group_id = "group-0"
        again.partial_samples.extend(begun)
        ledger.queued.append(again)
        await made.fakes.until(lambda: bool(ledger.puts))
    for before, sample in zip(begun, ledger.puts[0].samples, strict=True):
        tokens = [(r.end - r.start, r.masked) for r in sample.envelope.policy_ranges]
        num_begun = before.envelope.response_tokens
        assert tokens == [(num_begun, True), (100 - num_begun, False)]


async def test_unmasked_tokens_that_are_too_old_end_a_group_also_where_an_earlier_lease_made_them(
    tokenizer_folder: Path,
) -> None:
    ledger = MemoryLedger([lease(0)])
    partial = PartialRollout(mask_offpolicy=False, max_staleness=1)
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=ENDLESS, partial_rollout=partial
    ) as made:
        await made.fakes.until(lambda: made.fakes.fake(0).num_tokens > 30)
    again = lease(1, policy_version=1)
    again.group_id = "group-0"
    again.partial_samples.extend(ledger.releases[0].partial_samples)
    ledger = MemoryLedger()
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=ENDLESS, partial_rollout=partial
    ) as made:
        await made.fakes.name_weights(0, 1)
        made.fakes.fleet.weights.switch_to(1)
        ledger.queued.append(again)
        await made.fakes.until(lambda: made.fakes.fake(0).num_in_flight == 3)
        ledger.oldest_version = 1
        await made.fakes.until(lambda: bool(ledger.released))
    assert list(ledger.releases[0].partial_samples) == []
