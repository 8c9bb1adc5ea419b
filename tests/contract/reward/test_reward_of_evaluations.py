"""A data set's own reward function, in the service that scores training: its items are scored by it, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.score import Score, ScoreError, ScoreItem
from tests.support.processes.reward_server import served_reward

SOURCE = """
async def trained(args, sample, **kwargs): return 0.25
async def evaluated(args, sample, **kwargs): return 0.75
async def secret(args, sample, **kwargs): return 1.0
class Model:
    def __init__(self, model_path): pass
    def compute_reward(self, prompts, responses): return [0.0 for _ in prompts]
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("training", ["custom", "regex"])
async def test_a_data_sets_own_function_scores_its_items_and_no_others(training: str, source: str) -> None:
    leaves = {"rm_type": "regex"} if training == "regex" else {"custom_rm_path": f"{source}:trained"}
    own = f"{source}:evaluated"
    named = [{"rm_type": own}, {}, {"rm_type": f"{source}:secret"}]
    items = [ScoreItem(str(number), "3 + 4 =", "a7b", "7", metadata) for number, metadata in enumerate(named)]
    async with served_reward([own], **leaves) as client:
        evaluated, trained, foreign = await client.score(items, deadline_seconds=120)
    assert isinstance(evaluated, Score)
    assert isinstance(trained, Score)
    assert (evaluated.value, evaluated.scorer) == (0.75, own)
    assert trained.scorer == training
    # What the operator has not named is never loaded: it is training's function that tells rm_types apart, or nobody.
    if training == "custom":
        assert isinstance(foreign, Score)
        assert foreign.value == 0.25
    else:
        assert isinstance(foreign, ScoreError)
        assert foreign.reason == "SCORER_UNKNOWN"


@pytest.mark.parametrize(("name", "said"), [("Model", "a class made with a model's folder"), ("nobody", "nobody")])
async def test_a_function_that_cannot_be_called_ends_the_start(source: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        async with served_reward([f"{source}:{name}"], rm_type="math"):
            pass
