"""The trainer's hooks that see all samples of a step, or of an evaluation, tried on sample answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import load_hook
from headrace.hooks.sample import Sample
from headrace.hooks.trial.attempt import sample_answers

WholeBatchKind = Literal["sample_filter", "reward_post_process", "train_data", "rollout_log", "eval_log"]


async def try_whole_batch(path: str, kind: WholeBatchKind, args: HookArgs) -> str:
    """Describes the result for a group's answers. Runs in a worker.

    Raises the hook's exception, and InvalidArgument for a result of the wrong form.
    """
    target, samples = load_hook(path).target, _scored_answers()
    match kind:
        case "sample_filter":
            target(args, [samples])
            return f"leaves {sum(sample.remove_sample for sample in samples)} of {len(samples)} samples out of the loss"
        case "reward_post_process":
            return _post_processed(path, target(args, samples), samples)
        case "train_data":
            return _converted(path, target(args, samples), samples)
        case "rollout_log":
            metrics: dict[str, Any] = {}
            return _logged(target(0, args, samples, metrics, 1.0), metrics)
        case "eval_log":
            rewards, truncated = [s.reward for s in samples], [s.status is Sample.Status.TRUNCATED for s in samples]
            data = {"check": {"rewards": rewards, "truncated": truncated, "samples": samples}}
            metrics = {}
            return _logged(target(0, args, data, metrics), metrics)


def _scored_answers() -> list[Sample]:
    samples = sample_answers()
    for number, sample in enumerate(samples):
        sample.reward = float(number == 0)
        sample.tokens = list(range(2 + sample.response_length))
    return samples


def _post_processed(path: str, made: object, samples: Sequence[Sample]) -> str:
    if not isinstance(made, tuple) or len(made) != 2 or any(len(part) != len(samples) for part in made):
        raise InvalidArgument(f"hook {path} must return two lists of {len(samples)} numbers: raw rewards, rewards")
    return f"makes {list(made[1])} of the rewards {list(made[0])}"


def _converted(path: str, made: object, samples: Sequence[Sample]) -> str:
    if not isinstance(made, Mapping) or len(made.get("rewards", ())) != len(samples):
        raise InvalidArgument(f"hook {path} must return a dict with rewards, a list of {len(samples)}")
    return f"converts {len(samples)} samples: rewards {list(made['rewards'])}"


def _logged(alone: object, metrics: Mapping[str, Any]) -> str:
    named = ", ".join(metrics) or "no metrics of its own"
    return f"logs {'alone' if alone else 'beside headrace'}, with {named}"
