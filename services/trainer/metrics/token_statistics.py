"""A step's figures of its trained tokens: sums that micro-batches and ranks add up, and ratios of these."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.job.schema.training import TrainSection

MISMATCH = (
    "mismatch/training_log_ppl",
    "mismatch/training_ppl",
    "mismatch/rollout_log_ppl",
    "mismatch/rollout_ppl",
    "mismatch/kl",
    "mismatch/k3_kl",
    "mismatch/log_ppl_diff",
    "mismatch/log_ppl_abs_diff",
    "mismatch/ppl_ratio",
    "mismatch/chi2_token",
    "mismatch/chi2_sequence",
)
"""Means over the responses that have a trained token."""

SUMS = (
    "loss/policy",
    "loss/sft",
    "loss/custom",
    "loss/kl",
    "loss/entropy",
    "tokens",
    "entropy",
    "ratio",
    "ratio_squared",
    "ppo_kl",
    "clip_fraction",
    "clipped_low",
    "clipped_high",
    "tis_weight",
    "tis_weight_squared",
    "tis_truncated",
    "opsm_masked",
    "log_prob_diff",
    "rs_rejected",
    "rs_vetoed",
    "answers",
    *MISMATCH,
)
"""The squared statistics: of the distance from 1, near which the values are; plain squares would lose it."""

MAXIMA = ("ratio/max", "tis_weight/max")
"""The largest values over all tokens; none of them is ever negative."""

MEANS = {
    "entropy": "entropy",
    "ratio/mean": "ratio",
    "ppo_kl": "ppo_kl",
    "clip_fraction": "clip_fraction",
    "clip_fraction/low": "clipped_low",
    "clip_fraction/high": "clipped_high",
    "tis_weight/mean": "tis_weight",
    "tis_weight/truncated": "tis_truncated",
    "opsm/masked": "opsm_masked",
    "rs/rejected": "rs_rejected",
    "rs/vetoed": "rs_vetoed",
    "log_prob_diff/mean": "log_prob_diff",
}
"""Means over the trained tokens, by the sum they come from."""

DEVIATIONS = {"ratio/std": ("ratio", "ratio_squared"), "tis_weight/std": ("tis_weight", "tis_weight_squared")}
"""Standard deviations over the trained tokens, likewise."""


def reported(config: TrainSection, *, has_custom_tis: bool) -> frozenset[str]:
    """The names of a job's statistics. A user's function in the place of TIS reports what it likes, itself."""
    match config.loss_type:
        case "sft_loss":
            return frozenset({"entropy"})
        case "custom_loss":
            return frozenset({"entropy", "log_prob_diff/mean"})
    weighs = config.use_tis and not has_custom_tis
    absent = {"tis_weight": not weighs, "opsm": not config.use_opsm, "rs": not config.use_rs}
    names = {*MEANS, *DEVIATIONS, *MAXIMA, *MISMATCH}
    return frozenset(name for name in names if not absent.get(name.partition("/")[0], False))


def statistics(names: frozenset[str], sums: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    """The statistics called `names`, from the sums over all tokens and the largest values."""
    tokens = max(sums["tokens"], 1.0)
    found = {name: sums[source] / tokens for name, source in MEANS.items()}
    found |= {name: sums[name] / max(sums["answers"], 1.0) for name in MISMATCH}
    for name, (total, squared) in DEVIATIONS.items():
        distance = sums[total] / tokens - 1.0
        found[name] = max(sums[squared] / tokens - distance**2, 0.0) ** 0.5 if sums["tokens"] else 0.0
    return {name: value for name, value in (found | dict(largest)).items() if name in names}
