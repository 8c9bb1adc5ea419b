"""Hooks inside the trainer: what each is called with, by the flag that names it. Nothing here needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.hooks.load import Hook, load_hook
from headrace.hooks.signature import Signature, wrong_signature

TrainerKind = Literal[
    "sample_filter",
    "reward_post_process",
    "train_data",
    "rollout_log",
    "eval_log",
    "advantage",
    "rollout_data",
    "loss",
    "tis",
    "reducer",
    "megatron_init",
    "model_provider",
    "before_log_prob",
    "before_train_step",
]


@dataclass(frozen=True, slots=True)
class TrainerForm:
    """`positional` arguments come in this order, `keywords` by name, and more keywords may come with them.

    `if_named` come by name to functions that have an argument of that name.
    """

    positional: tuple[str, ...]
    returns: str
    keywords: tuple[str, ...] = ()
    if_named: tuple[str, ...] = ()

    @property
    def accepted(self) -> str:
        """The signature as a user would write it."""
        named = ", *, " + ", ".join(self.keywords) + ", **kwargs" if self.keywords else ""
        named += "".join(f"[, {name}]" for name in self.if_named)
        return f"def f({', '.join(self.positional)}{named}) -> {self.returns}"


TRAINER_FORMS: Mapping[TrainerKind, TrainerForm] = {
    "sample_filter": TrainerForm(("args", "samples"), "None"),
    "reward_post_process": TrainerForm(("args", "samples"), "tuple[list[float], list[float]]"),
    "train_data": TrainerForm(("args", "samples"), "dict[str, list]"),
    "rollout_log": TrainerForm(("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"), "bool"),
    "eval_log": TrainerForm(("rollout_id", "args", "data", "extra_metrics"), "bool"),
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
    "megatron_init": TrainerForm(("args",), "None"),
    "model_provider": TrainerForm(("pre_process", "post_process", "vp_stage"), "GPTModel", if_named=("build_default",)),
    "before_log_prob": TrainerForm(("args", "model", "store_prefix"), "None"),
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
        signature = inspect.signature(hook.target)
        named = [name for name in form.if_named if name in signature.parameters]
        signature.bind(*form.positional, **dict.fromkeys((*keywords, *named)))
    except TypeError:
        raise wrong_signature(path, hook.target, (form.accepted,)) from None
    return hook


def load_trainer_hook(path: str, kind: TrainerKind) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    trainer_hook(path, kind)


def trainer_kind(hook: Hook) -> TrainerKind | None:
    """Recognizes a kind by the names of its arguments; None when they are ambiguous.

    Sample filters, post-process functions and conversions have the arguments of a group's reward.
    """
    signature = Signature.of(hook.target)
    for kind, form in TRAINER_FORMS.items():
        positional = (*signature.required, *signature.optional)[: len(form.positional)]
        same = positional == form.positional and set(form.keywords) <= set(signature.required_keywords)
        if same and form.positional != ("args", "samples") and (form.keywords or len(form.positional) > 1):
            return kind
    return None
