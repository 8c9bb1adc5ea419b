"""Prefill and decode engines on a CPU: each request is computed by both, and both get every publication.

SGLang sends what the prefill engine computed with Mooncake, here over TCP: `mooncake-transfer-engine-non-cuda`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_whole_runs import ENGINE_BOUND, rows_of, started
from tests.long_forms import whole_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), whole_run]

GROUPS = [
    {"name": "prompts", "worker_type": "prefill", "num_engines": 1},
    {"name": "responses", "worker_type": "decode", "num_engines": 1},
]
DIVIDED = (
    *(word for group in GROUPS for word in ("--engine-groups", json.dumps(group))),
    *("--rollout-num-gpus", "2", "--update-weight-pause-mode", "abort", "--n-samples-per-prompt", "4"),
)


@pytest.fixture(autouse=True)
def _mooncake() -> None:
    missing = "mooncake-transfer-engine-non-cuda is not installed"
    pytest.importorskip("mooncake.engine", exc_type=ImportError, reason=missing)


async def test_responses_have_the_trainers_log_probs_after_each_publication(tmp_path: Path) -> None:
    async with started(tmp_path, *DIVIDED, "--num-rollout", "4", "--max-staleness", "0") as run:
        rows = await rows_of(run, 4)
    assert max(row["log_prob_diff/max"] for row in rows) < ENGINE_BOUND
    published = [event for event in run.events("rollout") if event["event"] == "published"]
    assert len(published) >= 4
    assert not any(event["lost"] for event in published)


async def test_requests_that_a_publication_aborts_go_on_under_the_next_weights(tmp_path: Path) -> None:
    flags = ("--partial-rollout", "--max-staleness", "2", "--rollout-max-response-len", "300", "--num-rollout", "5")
    async with started(tmp_path, *DIVIDED, *flags) as run:
        await rows_of(run, 5)
    ranges = [sample.policy_ranges for group in await run.groups() for sample in group.samples]
    assert any(len({each.policy_version for each in of_sample}) > 1 for of_sample in ranges)
