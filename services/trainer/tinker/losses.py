"""Tinker's losses: sums over the tokens of a request, with no average over anything.

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

Inputs = Mapping[str, "Tensor"]
"""float32 [B, S] each, 0 where a row has no token."""
Settings = Mapping[str, float]


def cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -log_probs * inputs["weights"]


def importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_ratio(log_probs, inputs) * inputs["advantages"]


def ppo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio, advantages = _ratio(log_probs, inputs), inputs["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, settings) * advantages)


def cispo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    weight = _clipped(_ratio(log_probs, inputs), settings).detach()
    return -weight * log_probs * inputs["advantages"]


def dro(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    distance = log_probs - inputs["logprobs"]
    return 0.5 * settings["beta"] * distance.square() - log_probs * inputs["advantages"]


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of each token, the columns that a datum must have beside its targets, and settings' defaults."""

    per_token: Callable[[Tensor, Inputs, Settings], Tensor]
    columns: Sequence[str]
    defaults: Settings = field(default_factory=dict)


_POLICY = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": Loss(ppo, _POLICY, _CLIPS),
    "cispo": Loss(cispo, _POLICY, _CLIPS),
    "dro": Loss(dro, _POLICY, {"beta": 0.05}),
}

_REFUSED = {
    "gspo": "how it is normalized is not published",
    "stable_reinforce": "its formula is not published",
    "custom": "losses are not uploaded here: forward_backward_custom runs them in the client",
}


def loss_of(name: str, given: Mapping[str, float | str]) -> tuple[Loss, Settings]:
    """The loss and its settings. Raises InvalidArgument for a loss or a setting that does not exist."""
    if name not in LOSSES:
        why = f": {_REFUSED[name]}" if name in _REFUSED else ""
        raise InvalidArgument(f"loss_fn {name!r} is not served{why}: use one of {', '.join(LOSSES)}", field="loss_fn")
    loss = LOSSES[name]
    for key, value in given.items():
        if key not in loss.defaults or isinstance(value, str):
            known = ", ".join(loss.defaults) or "none"
            raise InvalidArgument(f"loss_fn_config {key}={value!r}: {name} takes {known}", field="loss_fn_config")
    return loss, {**loss.defaults, **{key: float(value) for key, value in given.items()}}
