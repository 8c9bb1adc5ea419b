"""What the trainer's hooks give back is checked, and what they are given is theirs: they change nothing else by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks import to_hook
from headrace.hooks.args import HookArgs
from headrace.hooks.load import load_hook
from services.trainer.model.build import model_provider
from services.trainer.rl import objective
from services.trainer.rl.hooks import TrainData, WholeBatch, numbers, per_token
from services.trainer.rl.objective import CustomLoss, LossInputs, PolicyReducer
from tests.support.ledgers.answers import answered
from tests.support.ranks.micro_inputs import micro_inputs

LENGTHS = (3, 2)
Loss = Callable[[Any, dict[str, Any], Tensor, Callable[[Tensor], Tensor]], Any]


def terms() -> LossInputs:
    logits = torch.zeros(2, 3, 7, requires_grad=True) * 1.0
    log_probs = logits.log_softmax(-1)[..., 0]
    micro = micro_inputs(torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), lengths=LENGTHS)
    return LossInputs(micro, log_probs, -log_probs, logits)


def custom(loss: Loss) -> CustomLoss:
    """Without a job."""
    hook = CustomLoss.__new__(CustomLoss)
    hook._path, hook._args, hook._hook = "mine", cast(Any, None), loss
    return hook


@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        (lambda a, batch, logits, mean: (torch.zeros((), requires_grad=True), {}), "without a gradient"),
        (lambda a, batch, logits, mean: (logits.sum() * float("nan"), {}), "finite"),
        (lambda a, batch, logits, mean: (logits.mul_(2).sum(), {}), "written into the logits"),
        (lambda a, batch, logits, mean: (logits, {}), "one number"),
        (lambda a, batch, logits, mean: (logits.sum(), None), "a dict"),
    ],
)
def test_a_loss_that_trains_nothing_or_is_no_loss_is_an_error(loss: Loss, refused: str) -> None:
    with pytest.raises(InvalidArgument, match=refused):
        custom(loss)(terms())


def test_what_a_loss_writes_into_its_batch_reaches_nothing() -> None:
    def loss(args: Any, batch: dict[str, Any], logits: Tensor, mean: Callable[[Tensor], Tensor]) -> Any:
        for name in ("loss_masks", "advantages", "returns", "rollout_log_probs", "log_probs"):
            for tensor in batch[name]:
                tensor.fill_(9.0)
        return mean(torch.cat(batch["current_log_probs"])), {}

    given = terms()
    before = [given.log_probs.detach().clone(), given.micro.mask.clone()]
    custom(loss)(given)
    assert given.log_probs.equal(before[0])
    assert given.micro.mask.equal(before[1])
    assert not given.micro.advantages.any()


def test_a_reducer_has_the_gradient_of_what_it_reduces() -> None:
    def reduced(reduce: Callable[[Tensor], Tensor]) -> Tensor:
        hook = PolicyReducer.__new__(PolicyReducer)
        hook._path, hook._per_token, hook._hook = "mine", False, lambda *args: reduce
        given = terms()
        return hook.of(given.micro)(given.log_probs, given.micro.weights)

    torch.autograd.backward([reduced(lambda losses: losses.mean())])
    for reduce in (lambda losses: losses.detach().mean(), lambda losses: losses.sum() / 0.0, lambda losses: losses):
        with pytest.raises(InvalidArgument, match="reducer"):
            reduced(reduce)


def tis(hook: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a user's tis function makes of a loss of one a token."""
    monkeypatch.setattr(objective, "trainer_hook", lambda path, name: SimpleNamespace(target=hook))
    correct = objective.custom_correction("mine", cast(Any, None))
    return correct(terms(), torch.zeros(2, 3), torch.ones(2, 3)).loss


@pytest.mark.parametrize(
    ("returned", "refused"),
    [
        (lambda loss, masks: (loss, masks), "must return .pg_loss, loss_masks, metrics."),
        (lambda loss, masks: (loss, masks[:1], {}), "loss_masks of mine"),
        (lambda loss, masks: (loss, [mask * float("nan") for mask in masks], {}), "loss_masks of mine"),
        (lambda loss, masks: (loss, [mask * 2 for mask in masks], {}), "loss_masks of 0 to 1"),
        (lambda loss, masks: (loss[:-1], masks, {}), "one loss a token"),
        (lambda loss, masks: (loss / 0, masks, {}), "not finite for a token that is trained"),
        (lambda loss, masks: (loss, masks, None), "metrics as a dict"),
        (lambda loss, masks: (loss, masks, {"kept": loss[:1]}), "one number a token"),
    ],
)
def test_the_masks_of_a_tis_function_are_checked(returned: Any, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=refused):
        tis(lambda args, **given: returned(given["pg_loss"], given["loss_masks"]), monkeypatch)


def test_a_tis_function_takes_tokens_out_by_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(args: Any, **given: Any) -> Any:
        kept = [torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1.0, 1.0])]
        return given["pg_loss"] * 3, kept, {}

    assert tis(hook, monkeypatch).tolist() == [[3.0, 1.5, 0.0], [3.0, 3.0, 0.0]]


@pytest.mark.parametrize(
    "found",
    [
        None,
        [torch.zeros(3)],
        [torch.zeros(3), torch.zeros(3)],
        [torch.zeros(3), torch.tensor([0.0, float("nan")])],
    ],
)
def test_numbers_for_tokens_are_one_finite_row_a_sample(found: Any) -> None:
    with pytest.raises(InvalidArgument, match="advantages"):
        per_token("advantages", found, LENGTHS)


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
        (lambda samples: {"rewards": [1.0]}, "must return rewards as a list of 2"),
        (lambda samples: {"rewards": [1.0, float("nan")]}, "gave sample b the reward nan"),
        (lambda samples: {"rewards": [1, 2], "weights": [1, 2]}, "returned 'weights', which nothing reads"),
        (lambda samples: {"rewards": [1, 2], "loss_masks": [[1], [2]]}, "gave loss_masks of sample"),
        (
            lambda samples: {"rewards": [1, 2], "rollout_log_probs": [[np.inf] * s.response_length for s in samples]},
            "finite numbers",
        ),
        (lambda samples: {"rewards": [1, 2], "tokens": [[1], [2]]}, "changed tokens of sample a"),
    ],
)
def test_a_conversion_that_cannot_be_trained_on_is_refused(
    hook: str, answer: Callable[[list[Any]], Any], refused: str
) -> None:
    with pytest.raises(InvalidArgument) as error:
        converted(hook, answer)
    assert refused in error.value.message


def test_a_filter_that_leaves_a_mask_of_another_length_is_refused() -> None:
    sample = answered("a")
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
