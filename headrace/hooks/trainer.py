"""Hooks inside the trainer: what each is called with, by the flag that names it. Nothing here needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.hooks.load import Hook, load_hook
from headrace.hooks.signature import Signature, wrong_signature

TrainerKind = Literal["reward_post_process", "advantage", "rollout_data", "loss", "tis", "reducer", "before_train_step"]


@dataclass(frozen=True, slots=True)
class TrainerForm:
    """`positional` arguments come in this order, `keywords` by name, and more keywords may come with them."""

    positional: tuple[str, ...]
    returns: str
    keywords: tuple[str, ...] = ()

    @property
    def accepted(self) -> str:
        """The signature as a user would write it."""
        named = ", *, " + ", ".join(self.keywords) + ", **kwargs" if self.keywords else ""
        return f"def f({', '.join(self.positional)}{named}) -> {self.returns}"


TRAINER_FORMS: Mapping[TrainerKind, TrainerForm] = {
    "reward_post_process": TrainerForm(("args", "samples"), "tuple[list[float], list[float]]"),
    "advantage": TrainerForm(("args", "rollout_data"), "None"),
    "rollout_data": TrainerForm(("args", "rollout_id", "rollout_data"), "None"),
    "loss": TrainerForm(("args", "batch", "logits", "sum_of_sample_mean"), "tuple[Tensor, dict[str, Tensor]]"),
    "tis": TrainerForm(
        ("args",),
        "tuple[Tensor, list[Tensor], dict[str, Tensor]]",
        ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"),
    ),
    "reducer": TrainerForm(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"), "Callable[[Tensor], Tensor]"
    ),
    "before_train_step": TrainerForm(
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"), "None"
    ),
}


_ALSO_PASSED = ("total_lengths", "response_lengths", "metadata")
"""Keywords that come with those of a form."""


def trainer_hook(path: str, kind: TrainerKind) -> Hook:
    """Loads it. Raises ConfigError unless it can be called as the trainer calls it."""
    hook, form = load_hook(path), TRAINER_FORMS[kind]
    keywords = (*form.keywords, *_ALSO_PASSED) if form.keywords else ()
    try:
        inspect.signature(hook.target).bind(*form.positional, **dict.fromkeys(keywords))
    except TypeError:
        raise wrong_signature(path, hook.target, (form.accepted,)) from None
    return hook


def load_trainer_hook(path: str, kind: TrainerKind) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    trainer_hook(path, kind)


def trainer_kind(hook: Hook) -> TrainerKind | None:
    """Recognizes a kind by the names of its arguments; None when they are ambiguous.

    A post-process function has the arguments of a group's reward.
    """
    signature = Signature.of(hook.target)
    for kind, form in TRAINER_FORMS.items():
        positional = (*signature.required, *signature.optional)[: len(form.positional)]
        same = positional == form.positional and set(form.keywords) <= set(signature.required_keywords)
        if same and kind != "reward_post_process" and (form.keywords or len(form.positional) > 1):
            return kind
    return None
