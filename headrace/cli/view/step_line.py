"""A finished step or evaluation as one line of text, short enough to be read while it scrolls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_PARTS: Mapping[str, tuple[str, str]] = {
    "reward/all/mean": ("reward", ".3f"),
    "reward/mean": ("of trained", ".3f"),
    "loss/sft": ("loss", ".4f"),
    "critic/loss": ("critic's loss", ".4f"),
    "loss/kl": ("KL to the start", ".4f"),
    "entropy": ("entropy", ".3f"),
    "grad_norm": ("gradient norm", ".3g"),
    "response_length/mean": ("tokens a response", ".1f"),
    "tokens_per_second": ("tokens/s", ".0f"),
    "time/step_seconds": ("seconds", ".1f"),
}
"""What a person looks at, in this order: its label and format.

The first reward is the mean of all scored groups: filters choose what is trained, so it alone shows what the policy
can do.
Not `loss/policy`: on fresh samples its value is 0 whatever its gradient is, and reads as a failure.
"""


def step_line(metrics: Mapping[str, float], skip: Sequence[str] = ()) -> str:
    """Empty when no metric of a step is present."""
    labels = {name: label for name, (label, _) in _PARTS.items()}
    if "reward/all/mean" not in metrics:
        labels["reward/mean"] = "reward"
    wanted = [name for name in _PARTS if name in metrics and name not in skip]
    parts = [f"{labels[name]} {metrics[name]:{_PARTS[name][1]}}" for name in wanted]
    if metrics.get("reward/std") == 0.0 and metrics.get("samples/count", 0.0) > 1:
        parts.append("nothing to learn in this step: all rewards are equal")
    return ", ".join(parts)


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Empty when nothing was evaluated."""
    return ", ".join(f"{name.removeprefix('eval/')} {metrics[name]:.3f}" for name in evaluations(metrics))


def evaluations(metrics: Mapping[str, float]) -> list[str]:
    """The data sets' mean rewards among the metrics: `eval/NAME`."""
    return [name for name in metrics if name.startswith("eval/") and name.count("/") == 1]


def duration(seconds: float) -> str:
    """Formats a duration for a person: 40 s, 6 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 90 else f"{whole // 60} h {whole % 60} min"
