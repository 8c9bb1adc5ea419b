"""Groups that no step can train any more: what a producer does when the ledger says so."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("mask_offpolicy", [False, True])
async def test_groups_whose_tokens_a_later_lease_goes_on_with_are_left_alone(
    tokenizer_folder: Path, *, mask_offpolicy: bool
) -> None:
    ledger = MemoryLedger([lease(0)])
    ledger.oldest_version = 1
    partial = PartialRollout(mask_offpolicy, max_staleness=0)
    params = SamplingParams(max_new_tokens=30)
    async with production(
        tokenizer_folder, ledger, score(1.0), token_seconds=0.01, params=params, partial_rollout=partial
    ) as made:
        await made.fakes.until(lambda: bool(ledger.puts or ledger.released))
    assert ledger.released == []
