"""A user's function that makes the policy's Megatron modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from megatron.core.models.gpt.gpt_model import GPTModel

from headrace.errors import ConfigError
from headrace.hooks.trainer import trainer_hook
from services.trainer.megatron.gpt.gpt import ModelProvider

_DEFAULT = "build_default"


def model_provider(path: str | None) -> ModelProvider | None:
    """`f(pre_process, post_process, vp_stage) -> GPTModel`, or with `build_default` as a fourth; None without.

    `build_default()` makes the module that would be used without the function, to be changed. Weights are loaded by the
    names and shapes of the checkpoint's family, so that they must stay. The critic is made without it.
    """
    if path is None:
        return None
    target = trainer_hook(path, "model_provider").target
    takes_default = _DEFAULT in inspect.signature(target).parameters

    def provide(is_first: bool, is_last: bool, virtual: int | None, build_default: Callable[[], GPTModel]) -> GPTModel:
        given = {_DEFAULT: build_default} if takes_default else {}
        model = target(pre_process=is_first, post_process=is_last, vp_stage=virtual, **given)
        if not isinstance(model, GPTModel):
            raise ConfigError(
                f"hook {path} returned {type(model).__name__}; it must return a megatron.core GPTModel: change the one "
                f"of {_DEFAULT}(), its fourth argument",
                field="custom_model_provider_path",
            )
        return model

    return provide
