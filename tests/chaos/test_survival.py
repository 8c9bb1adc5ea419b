"""`kill -9` of each process of a whole run in each phase: it goes on, and the audit finds nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.survival import PHASES, survive


@pytest.mark.skipif("HEADRACE_SURVIVAL" not in os.environ, reason="long: make chaos sets HEADRACE_SURVIVAL")
@pytest.mark.ranks
@pytest.mark.timeout(7200)
async def test_a_whole_run_goes_on_after_each_kill_in_each_phase_and_its_audit_finds_nothing(tmp_path: Path) -> None:
    outcomes, is_clean = await survive(tmp_path)
    assert is_clean
    assert {each.phase for each in outcomes} == set(PHASES)
