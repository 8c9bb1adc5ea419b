"""An environment of the package `verifiers` plays samples of the rollout service from a Python of its own.

`make examples` sets that Python up and names it in HEADRACE_VERIFIERS_PYTHON.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.agent_hosts import host, lending
from tests.support.agents import require_as_sampled

PYTHON = os.environ.get("HEADRACE_VERIFIERS_PYTHON")
EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "verifiers_env.py"


@pytest.mark.skipif(PYTHON is None, reason="long: make examples sets HEADRACE_VERIFIERS_PYTHON")
@pytest.mark.timeout(900)
async def test_an_environment_of_verifiers_plays_with_its_own_client_and_its_rubric_gives_the_reward(
    tmp_path: Path,
) -> None:
    async with (
        lending(tmp_path) as (made, _, _, address),
        host(address, "--agent-function-path", f"{EXAMPLE}:run", python=str(PYTHON)),
    ):
        samples = await made.produced()
    for sample in samples:
        require_as_sampled(sample)
        assert (sample.failure, int(sample.loss_mask.sum())) == (None, 6)
        assert sample.reward in (0.0, 1.0)
        assert '"add"' in sample.prompt  # the environment's tool, which its client has sent
