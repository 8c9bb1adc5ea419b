"""What a job may combine each advantage estimator with; its mathematics is in `services/trainer/rl/algorithms/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CRITIC = ("critic_load", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", "value_clip")
_AGAINST_THE_GROUP = ("disable_grpo_std_normalization", "disable_rewards_normalization")


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    name: str
    reads: tuple[str, ...] = ()
    """Of the options that only some estimators read, those that this one does."""
    needs: tuple[str, ...] = ()
    """Options without which it is not defined."""
    has_critic: bool = False
    compares_group: bool = False
    """A sample counts against its siblings: without siblings every advantage is 0."""


_SPECS = (
    AlgorithmSpec("grpo", (*_AGAINST_THE_GROUP, "eps_clip_c"), compares_group=True),
    AlgorithmSpec("gspo", (*_AGAINST_THE_GROUP, "eps_clip_c"), compares_group=True),
    AlgorithmSpec("cispo", _AGAINST_THE_GROUP, compares_group=True),
    AlgorithmSpec("rloo", ("eps_clip_c",), compares_group=True),
    AlgorithmSpec("reinforce_plus_plus", ("kl_coef", "gamma", "eps_clip_c"), ("normalize_advantages",)),
    AlgorithmSpec(
        "reinforce_plus_plus_baseline", ("kl_coef", "eps_clip_c"), ("normalize_advantages",), compares_group=True
    ),
    AlgorithmSpec("ppo", ("kl_coef", "gamma", "lambd", "eps_clip_c", *_CRITIC), has_critic=True),
)

ALGORITHMS: Mapping[str, AlgorithmSpec] = {spec.name: spec for spec in _SPECS}
"""By the name that `advantage_estimator` gives."""


def readers(option: str) -> list[str]:
    """The estimators that read an option; none for an option that all read."""
    return [spec.name for spec in _SPECS if option in spec.reads]


def options_of_some() -> list[str]:
    return list(dict.fromkeys(option for spec in _SPECS for option in spec.reads))
