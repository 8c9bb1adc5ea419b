"""The critic's flags act: what it starts from, how it warms up, and how far a value may move. No model is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.job.schema.job import Job
from services.trainer.hugging_face.rank_model import RankModel
from services.trainer.megatron.optimizer import parameter_schedule
from services.trainer.model import critic
from services.trainer.model.build import critic_of
from services.trainer.model.critic import Critic
from tests.support.ranks.micro_inputs import micro_inputs


class Parameters:
    """What a schedule writes to."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, float]] = [{}]


class Seen:
    """Stands where the model, its files and its optimizer are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[Path] = []
        self.args: list[Any] = []
        self.terms: list[Tensor] = []
        self.zero_grad = lambda: None
        model = SimpleNamespace(
            config=None, packing=None, stages=[SimpleNamespace()], converter=SimpleNamespace(load=self.loaded.append)
        )
        monkeypatch.setattr(RankModel, "of", lambda *_: model)
        monkeypatch.setattr(critic, "wrap_for_data_parallel", lambda *_: [])
        monkeypatch.setattr(critic, "_shards", lambda *_: [])
        monkeypatch.setattr(critic, "ModelState", lambda *_: None)
        monkeypatch.setattr(critic, "Optimizer", lambda args, *_: self._optimizer(args))
        monkeypatch.setattr(critic, "Runner", lambda *_, **__: SimpleNamespace(train=self._train))
        monkeypatch.setattr(critic, "placed", lambda values, *_: values.reshape(1, 1))
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)

    def _optimizer(self, args: Any) -> SimpleNamespace:
        self.args.append(args)
        return SimpleNamespace(zero_grad=lambda: None, step=lambda updates: {"grad_norm": 0.0, "lr": 0.0})

    def _train(self, _: object, loss: Callable[[int, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [loss(0, torch.full((1,), 2.0))[1]]


@pytest.fixture
def build(load_with, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Seen, Critic, Job]]:
    layout = SimpleNamespace(is_last_stage=False, is_reporting_rank=True, device="cpu", context=None)

    def built(*flags: str) -> tuple[Seen, Critic, Job]:
        seen, job = Seen(monkeypatch), load_with("--advantage-estimator", "ppo", *flags)
        found = critic_of(job, layout, None)  # type: ignore[arg-type]
        return seen, found, job

    return built


def test_the_critic_starts_from_critic_load(build, model: Path, tmp_path: Path) -> None:
    assert build()[0].loaded == [model]
    other = tmp_path / "critic"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert build("--critic-load", str(other))[0].loaded == [other]


@pytest.mark.parametrize(("warmup", "expected"), [("0", 1e-4), ("10", 4e-5)])
def test_critic_lr_warmup_iters_is_the_length_of_its_warm_up(build, warmup: str, expected: float) -> None:
    (args,) = build("--critic-lr", "1e-4", "--critic-lr-warmup-iters", warmup)[0].args
    optimizer = Parameters()
    parameter_schedule(optimizer, args, 100).step(increment=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(("value_clip", "expected"), [("0.5", 0.25), ("5", 0.0)])
def test_value_clip_is_how_far_a_value_may_move_towards_its_return(build, value_clip: str, expected: float) -> None:
    _, found, _ = build("--value-clip", value_clip)
    found._layout = SimpleNamespace(is_last_stage=True, is_reporting_rank=True, device="cpu", context=None)
    micro = micro_inputs(torch.ones(1, 1), returns=torch.full((1, 1), 2.0))
    micro = SimpleNamespace(
        mask=micro.mask,
        weights=micro.weights,
        returns=micro.returns,
        values=torch.full((1, 1), 1.0),
        logit_positions=torch.tensor([0]),
    )
    metrics = found.train([micro])
    assert metrics["critic/loss"] == pytest.approx(expected)
