"""A rollout function's evaluation, read sample by sample: slime's `{name: {"rewards", "truncated", "samples"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.reward import checked_reward
from headrace.hooks.sample import Sample
from headrace.prompts import label_text


@dataclass(frozen=True)
class EvalDataset:
    """One of `args.eval_datasets`, under slime's names."""

    name: str
    path: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int | None
    max_response_len: int
    min_new_tokens: int
    input_key: str
    label_key: str | None
    metadata_key: str | None
    tool_key: str | None
    rm_type: str | None


@dataclass(frozen=True)
class EvalSample:
    """A sample of an evaluation as far as its numbers and the log of samples need it."""

    reward: float | None
    truncated: bool
    prompt: str = ""
    response: str = ""
    label: str | None = None
    response_length: int = 0
    tokens: list[int] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    why_failed: str | None = None


@dataclass(frozen=True)
class EvalData:
    """The samples of one data set; those of one prompt have one number in `prompts`."""

    samples: list[EvalSample]
    prompts: list[int]


def eval_data(path: str, name: str, given: Mapping[str, Any], reward_keys: Mapping[str, str]) -> EvalData:
    """Raises InvalidArgument for rewards that are none, and for lists of different lengths."""
    rewards = _list(path, name, "rewards", given.get("rewards"))
    truncated = _list(path, name, "truncated", given.get("truncated") or [False] * len(rewards))
    samples = _list(path, name, "samples", given.get("samples") or [None] * len(rewards))
    if not len(rewards) == len(truncated) == len(samples):
        raise InvalidArgument(
            f"hook {path} returned {len(rewards)} rewards, {len(truncated)} truncated and {len(samples)} samples of "
            f"{name}: each sample has one of each"
        )
    key = reward_keys.get(name)
    made = [
        _sample(path, _part(path, name, reward, key), bool(cut), sample)
        for reward, cut, sample in zip(rewards, truncated, samples, strict=True)
    ]
    return EvalData(made, _prompts(samples))


def _list(path: str, name: str, what: str, given: Any) -> list[Any]:
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple):
        raise InvalidArgument(f"hook {path} returned {type(given).__name__} as the {what} of {name}; they are a list")
    return list(listed)


def _part(path: str, name: str, reward: Any, key: str | None) -> float | None:
    if reward is None:
        return None
    checked = checked_reward(path, reward)
    if isinstance(checked, str):
        raise InvalidArgument(f"evaluation {name}: {checked}")
    if not isinstance(checked, dict):
        return checked
    if key not in checked:
        raise InvalidArgument(
            f"hook {path} returned rewards of {name} with the parts {sorted(checked)}: choose one with "
            "--eval-reward-key"
        )
    return checked[key]


def _sample(path: str, reward: float | None, truncated: bool, sample: Any) -> EvalSample:
    if not isinstance(sample, Sample):
        return EvalSample(reward, truncated, why_failed=None if reward is not None else "it has no reward")
    failed = sample.status is Sample.Status.FAILED
    why = "it has no reward" if reward is None else None
    if failed:
        why = sample.failure_reason or "its status is FAILED"
    return EvalSample(
        reward=None if failed else reward,
        truncated=truncated,
        prompt=_text(sample.prompt),
        response=_text(sample.response),
        label=label_text(sample.label),
        response_length=_length(sample),
        tokens=[int(token) for token in sample.tokens],
        weight_versions=[str(version) for version in sample.weight_versions],
        why_failed=why,
    )


def _length(sample: Sample) -> int:
    length = sample.response_length
    return length if isinstance(length, int) and 0 <= length <= len(sample.tokens) else 0


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value if isinstance(turn, dict))
    return str(value)


def _prompts(samples: list[Any]) -> list[int]:
    """Numbers the prompts: samples with equal ones belong together, those without are prompts of their own."""
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault(_text(each.prompt) if isinstance(each, Sample) else (position,), len(numbers))
        for position, each in enumerate(samples)
    ]
