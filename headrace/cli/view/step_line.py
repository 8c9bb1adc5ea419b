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

_FILTERED, _PRODUCED, _REASON = "samples/filtered", "samples/produced", "reason/"


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


def skipped_line(metrics: Mapping[str, float]) -> str:
    """`dynamic sampling skipped 48 of 200 samples: 32 all right, 16 all wrong`; empty where it skipped none."""
    if not metrics.get(_FILTERED):
        return ""
    counts = {
        name.removeprefix(f"{_FILTERED}/"): number
        for name, number in metrics.items()
        if name.startswith(f"{_FILTERED}/") and number
    }
    ranked = sorted(counts, key=lambda kind: (-counts[kind], kind.startswith(_REASON), kind))
    said = ", ".join(f"{counts[kind]:.0f} {_said(kind)}" for kind in ranked)
    return f"dynamic sampling skipped {metrics[_FILTERED]:.0f} of {metrics[_PRODUCED]:.0f} samples: {said}"


def _said(kind: str) -> str:
    reason = kind.removeprefix(_REASON)
    return kind.replace("_", " ") if reason == kind else f'"{reason}"'


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
