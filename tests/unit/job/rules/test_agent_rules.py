"""Options that an agent cannot be combined with are refused with the way out."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--custom-generate-function-path", "a.py:g"), "custom_generate_function_path with agent_function_path: both"),
        (
            ("--partial-rollout", "--max-staleness", "1"),
            "partial_rollout with agent_function_path: an agent's run cannot be continued",
        ),
        (("--generate-per-sample",), "generate_per_sample"),
    ],
)
def test_an_option_without_a_meaning_for_agents_is_refused(load_with, words: tuple[str, ...], said: str) -> None:
    assert load_with("--agent-function-path", "agents.run", "--max-turns", "3").rollout.max_turns == 3
    with pytest.raises(ConfigError, match=said):
        load_with("--agent-function-path", "agents.run", *words)
