"""Tutorials as a reader runs them: every command of the page, with real services, a real engine and the small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long_forms import ALL
from tests.support.tutorials import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
PAGES = ("own_reward", "kill_and_resume") if ALL else ("own_reward",)
SHORT = {"HEADRACE_NUM_ROLLOUT": "1", "HEADRACE_ROLLOUT_BATCH_SIZE": "2"}
"""`make examples` runs every page whole."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_its_first_command_to_its_last(page: str, tmp_path: Path) -> None:
    assert run(page, tmp_path, {} if ALL else SHORT) == 0
