"""The returns of rollout functions, under slime's names; plain lists and dicts are read as the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.reward import checked_reward
from headrace.hooks.sample import Sample
from headrace.prompts import label_text

_TRAIN = "a list of groups of samples, or RolloutFnTrainOutput(samples, metrics)"
_EVAL = 'a dict {name: {"rewards": […], "truncated": […], "samples": […]}}, or RolloutFnEvalOutput(data, metrics)'


@dataclass
class RolloutFnTrainOutput:
    """The groups that are to be trained, and numbers for the log."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`data` holds for each data set `rewards`, one a sample, and optionally `truncated` and `samples`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def train_output(path: str, returned: Any) -> RolloutFnTrainOutput:
    """Reads what a function has returned. Raises InvalidArgument for anything else."""
    samples = getattr(returned, "samples", returned)
    if not isinstance(samples, list):
        raise InvalidArgument(f"hook {path} returned {type(samples).__name__}; it must return {_TRAIN}")
    return RolloutFnTrainOutput(samples, _metrics(returned))


def eval_output(path: str, returned: Any) -> RolloutFnEvalOutput:
    """Reads what a function has returned from an evaluation. Raises InvalidArgument for anything else."""
    data = getattr(returned, "data", returned)
    if not isinstance(data, dict) or not all(isinstance(each, Mapping) for each in data.values()):
        raise InvalidArgument(f"hook {path} returned {type(data).__name__} from an evaluation; it must return {_EVAL}")
    return RolloutFnEvalOutput(data, _metrics(returned))


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _metrics(returned: Any) -> dict[str, Any] | None:
    metrics = getattr(returned, "metrics", None)
    return metrics if isinstance(metrics, dict) else None


# An evaluation, read sample by sample.


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


EvalData = list[list[Sample]]
"""The samples of one data set by prompts, as far as its numbers and the log of samples need them; none is trained."""


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
    prompts: dict[object, list[Sample]] = {}
    for position, (reward, cut, given_sample) in enumerate(zip(rewards, truncated, samples, strict=True)):
        sample = given_sample if isinstance(given_sample, Sample) else None
        of_prompt = prompts.setdefault(_text(sample.prompt) if sample else position, [])
        of_prompt.append(_evaluated(sample or Sample(), _part(path, name, reward, key), is_cut=bool(cut)))
    return list(prompts.values())


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


def _evaluated(sample: Sample, reward: float | None, *, is_cut: bool) -> Sample:
    """A sample has at least one token, which stands for those that the function left out."""
    length, why = _length(sample), "it has no reward" if reward is None else None
    if sample.status is Sample.Status.FAILED:
        why = sample.failure_reason or "its status is FAILED"
    status = Sample.Status.TRUNCATED if is_cut else Sample.Status.COMPLETED
    return Sample(
        prompt=_text(sample.prompt),
        response=_text(sample.response),
        label=label_text(sample.label),
        response_length=length,
        tokens=[int(token) for token in sample.tokens] or [0],
        loss_mask=[0] * length,
        rollout_log_probs=[0.0] * length,
        weight_versions=[str(version) for version in sample.weight_versions],
        reward=None if why else reward,
        status=Sample.Status.FAILED if why else status,
        failure_reason=why,
    )


def _length(sample: Sample) -> int:
    length = sample.response_length
    return length if isinstance(length, int) and 0 <= length <= len(sample.tokens) else 0


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value if isinstance(turn, dict))
    return str(value)
