"""What hooks that see a whole batch may not give back: refused with the key, the sample and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import to_hook
from headrace.hooks.args import HookArgs
from headrace.hooks.load import load_hook
from headrace.trajectory import Sample
from services.trainer.model.build import model_provider
from services.trainer.rl.whole_batch import TrainData, WholeBatch, numbers
from tests.support.ledgers.answers import answered

SOURCE = """
made = {}
def convert(args, samples): return made["answer"](samples)
def model(pre_process, post_process, vp_stage=None): return made["answer"](None)
"""


@pytest.fixture
def hook(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path / 'mine.py'}:convert"


def converted(hook: str, answer: Callable[[list[Any]], Any]) -> Any:
    convert = TrainData(hook, HookArgs({}))
    load_hook(hook).target.__globals__["made"]["answer"] = answer
    samples = [answered("a"), answered("b")]
    return convert(samples, [to_hook(sample, 0) for sample in samples])


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (lambda samples: None, "returned NoneType; it must return a dict"),
        (lambda samples: {}, "must return rewards as a list of 2"),
        (lambda samples: {"rewards": [1.0]}, "must return rewards as a list of 2"),
        (lambda samples: {"rewards": [1.0, float("nan")]}, "gave sample b the reward nan"),
        (lambda samples: {"rewards": [1.0, "much"]}, "gave sample b the reward 'much'"),
        (lambda samples: {"rewards": [1, 2], "weights": [1, 2]}, "returned 'weights', which nothing reads"),
        (lambda samples: {"rewards": [1, 2], "loss_masks": [[1], [2]]}, "gave loss_masks of sample"),
        (
            lambda samples: {"rewards": [1, 2], "loss_masks": [[2] * s.response_length for s in samples]},
            "zeros and ones",
        ),
        (
            lambda samples: {"rewards": [1, 2], "rollout_log_probs": [[np.inf] * s.response_length for s in samples]},
            "finite numbers",
        ),
        (lambda samples: {"rewards": [1, 2], "tokens": [[1], [2]]}, "changed tokens of sample a"),
        (lambda samples: {"rewards": [1, 2], "response_lengths": [0, 0]}, "changed response_lengths of sample a"),
    ],
)
def test_a_conversion_that_cannot_be_trained_on_is_refused(
    hook: str, answer: Callable[[list[Any]], Any], refused: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        converted(hook, answer)
    assert refused in error.value.message


def test_a_conversion_of_everything_as_it_was_changes_the_rewards_alone(hook: str) -> None:
    found = converted(
        hook,
        lambda samples: {
            "rewards": np.arange(2.0),
            "tokens": [np.asarray(sample.tokens) for sample in samples],
            "loss_masks": [sample.loss_mask for sample in samples],
            "rollout_log_probs": [np.asarray(sample.rollout_log_probs, np.float32) for sample in samples],
            "metadata": [{} for _ in samples],
        },
    )
    assert (found.rewards, found.masks, found.log_probs) == ({"a": 0.0, "b": 1.0}, {}, {})


def test_a_filter_that_leaves_a_mask_of_another_length_is_refused() -> None:
    sample: Sample = answered("a")
    seen = to_hook(sample, 0)
    batch = WholeBatch([sample], [seen])
    assert batch.changed_masks("mine") == {}
    seen.loss_mask = [1] * (sample.response_length + 1)
    with pytest.raises(InvalidArgument, match="hook mine gave loss_mask of sample a values"):
        batch.changed_masks("mine")
    seen.loss_mask, seen.remove_sample = list(sample.loss_mask), True
    assert batch.changed_masks("mine") == {"a": bytes(sample.response_length)}


def test_metrics_that_are_no_numbers_are_left_out() -> None:
    assert numbers("mine", {"a": 1, "b": "x", "c": float("inf"), "d": np.float32(0.5)}) == {"a": 1.0, "d": 0.5}


def test_a_model_provider_must_return_a_model(hook: str) -> None:
    path = hook.replace(":convert", ":model")
    provide = model_provider(path)
    assert provide is not None
    load_hook(path).target.__globals__["made"]["answer"] = lambda _: nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="returned Linear; it must return a megatron.core GPTModel"):
        provide(True, True, None, lambda: GPTModel.__new__(GPTModel))
