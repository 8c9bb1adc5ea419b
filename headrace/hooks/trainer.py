"""Hooks inside the trainer: what each is called with, by the flag that names it. Nothing here needs torch."""

from __future__ import annotations

import inspect

from headrace.hooks.load import Hook, Signature, load_hook, wrong_signature
from headrace.job.hook_files import TRAINER_FORMS

_ALSO_PASSED = ("total_lengths", "response_lengths", "metadata")
"""Keywords that come with those of a form."""


def trainer_hook(path: str, kind: str) -> Hook:
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


def load_trainer_hook(path: str, kind: str) -> None:
    """Runs in a worker. Raises ConfigError for what cannot be loaded or called."""
    trainer_hook(path, kind)


def trainer_kind(hook: Hook) -> str | None:
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
