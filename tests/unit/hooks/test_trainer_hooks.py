"""Hooks of the trainer: recognised by their arguments, and refused with the right form when they cannot be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import default_args
from headrace.hooks.trainer import trainer_hook
from headrace.hooks.trial.check import recognise
from headrace.hooks.trial.dry_run import dry_run

SOURCE = """
def advantage(args, rollout_data): pass
def rollout_data(args, rollout_id, rollout_data): pass
def loss(args, batch, logits, sum_of_sample_mean): pass
def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): pass
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False, more=1): pass
def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): pass
def reward_post_process(args, samples): return [s.reward for s in samples], [0.5 for _ in samples]

def sample_filter(args, samples):
    for sample in samples[0][1:]: sample.remove_sample = True
def train_data(args, samples): return {"rewards": [1.5 for _ in samples]}
def nothing(args, samples): return {}
def rollout_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time): rollout_extra_metrics["mine"] = 1
def eval_log(rollout_id, args, data, extra_metrics): return len(data["check"]["samples"]) == 4
def megatron_init(args): pass
def model_provider(pre_process, post_process, vp_stage=None): pass
def changes_model(pre_process, post_process, vp_stage, build_default): pass
def before_log_prob(args, model, store_prefix): pass

def closed_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks): pass
def greedy_tis(args, *, pg_loss, temperature, **kwargs): pass
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return str(file)


@pytest.mark.parametrize(
    "kind",
    [
        *("advantage", "rollout_data", "loss", "tis", "before_train_step"),
        *("rollout_log", "eval_log", "model_provider", "before_log_prob"),
    ],
)
def test_check_tells_a_trainers_hook_by_its_arguments(source: str, kind: str) -> None:
    assert recognise(f"{source}:{kind}", None)[0] == kind


def test_check_is_told_what_arguments_do_not_tell(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "hook", f"{source}:reward_post_process", "--kind", "reward_post_process"]) == 0
    assert "is a reward_post_process function" in capsys.readouterr().out
    assert recognise(f"{source}:reducer", None)[0] == "reducer"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sample_filter", "leaves 3 of 4 samples out of the loss"),
        ("train_data", "converts 4 samples: rewards [1.5, 1.5, 1.5, 1.5]"),
        ("rollout_log", "logs beside headrace, with mine"),
        ("eval_log", "logs alone, with no metrics of its own"),
        ("megatron_init", "it is not called here"),
    ],
)
async def test_check_shows_sample_answers_to_what_sees_a_whole_batch(source: str, kind: str, told: str) -> None:
    assert told in await dry_run(f"{source}:{kind}", kind, default_args())


async def test_what_the_trainer_could_not_use_is_refused_and_a_model_provider_may_take_the_default_model(
    source: str,
) -> None:
    assert trainer_hook(f"{source}:changes_model", "model_provider")
    with pytest.raises(InvalidArgument, match="must return a dict with rewards"):
        await dry_run(f"{source}:nothing", "train_data", default_args())


@pytest.mark.parametrize(
    ("name", "kind", "accepted"),
    [
        ("advantage", "loss", "def f(args, batch, logits, sum_of_sample_mean) -> tuple[Tensor, dict[str, Tensor]]"),
        ("closed_tis", "tis", "def f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs)"),
        ("greedy_tis", "tis", "cannot be called"),
        ("advantage", "reducer", "def f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)"),
    ],
)
def test_a_hook_that_the_trainer_could_not_call_is_refused_with_the_right_form(
    source: str, name: str, kind: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer_hook(f"{source}:{name}", kind)
    assert accepted in refused.value.message
