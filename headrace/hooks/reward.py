"""Reward hooks: a user's function or class that scores responses, in the forms in use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, SupportsFloat

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.load import Hook, Signature, awaited, load_hook, wrong_signature
from headrace.hooks.sample import Sample
from headrace.limits import MAX_TAGS, require_at_most, require_name
from headrace.trajectory import MAX_REWARD, check_text

ACCEPTED = (
    "async def f(args, sample, **kw) -> float | dict",
    "async def f(args, samples) -> list[float | dict]      with --group-rm",
    "class C: __init__(self, model_path); compute_reward(self, prompts, responses) -> list[float]",
    "def f(prompts, completions, **kwargs) -> list[float | None]      TRL's form, sync or async",
)

_COMPLETIONS = "completions"
"""The argument that every reward function of TRL has, and no other form."""
_OF_TRAINER = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
"""Further arguments that TRL gives, which mean nothing in a service."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Reward = float | dict[str, float]
NoReward = str
"""Why what was returned is no reward, in one sentence."""


class RewardForm(Enum):
    """The arguments that one call gets."""

    SAMPLE = "one sample"
    GROUP = "all samples of a group"
    BATCH = "prompts and responses of any samples"
    COMPLETIONS = "prompts, completions and columns of a group"


@dataclass(frozen=True, slots=True)
class RewardHook:
    """Properties of a user's reward that the service needs before it calls it."""

    path: str
    form: RewardForm
    version: str
    is_async: bool
    description: str


def reward_hook(path: str, group_rm: bool = False) -> RewardHook:
    """Loads and recognises it. Raises ConfigError for what is none of `ACCEPTED`."""
    hook = load_hook(path)
    form, function = _form_of(hook, group_rm)
    lines = (hook.target.__doc__ or "").strip().splitlines()
    return RewardHook(path, form, hook.version, inspect.iscoroutinefunction(function), lines[0] if lines else path)


def reward_hook_by_name(path: str) -> RewardHook:
    """The same where nothing says whether it takes a group: it does when its second argument is `samples`."""
    target = load_hook(path).target
    return reward_hook(path, not inspect.isclass(target) and Signature.of(target).required[1:2] == ("samples",))


def prepare_reward(path: str, form: RewardForm, model_path: str | None) -> None:
    """Imports the hook, and makes its class, before the clock of a first call runs."""
    load_hook(path)
    if form is RewardForm.BATCH:
        _model(path, model_path)


async def run_reward(
    path: str, form: RewardForm, args: HookArgs, samples: Sequence[Sample]
) -> list[Reward | NoReward | None]:
    """One reward a sample, why it has none, or None where the function abstains. Runs in a worker.

    Raises InvalidArgument for any other return.
    """
    target = load_hook(path).target
    if form is RewardForm.SAMPLE:
        return [_checked(path, await awaited(target(args, sample))) for sample in samples]
    if form is RewardForm.GROUP:
        rewards = await awaited(target(args, list(samples)))
    elif form is RewardForm.COMPLETIONS:
        rewards = await awaited(target(**_columns(path, target, args, samples)))
    else:
        model = _model(path, args.reward_model_path)
        rewards = await awaited(model.compute_reward([s.prompt for s in samples], [s.response for s in samples]))
    if hasattr(rewards, "tolist"):  # an array, or a tensor
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
        found = f"{len(rewards)} rewards" if isinstance(rewards, list | tuple) else type(rewards).__name__
        raise InvalidArgument(
            f"hook {path} returned {found} for {len(samples)} samples; it must return a list of as many"
        )
    return [_checked(path, reward) for reward in rewards]


def _checked(path: str, reward: Any) -> Reward | NoReward | None:
    return None if reward is None else checked_reward(path, reward)


def _form_of(hook: Hook, group_rm: bool) -> tuple[RewardForm, Any]:
    if inspect.isclass(hook.target):
        method = getattr(hook.target, "compute_reward", None)
        if not inspect.isfunction(method) or len(Signature.of(method).required) != 3:
            raise wrong_signature(hook.path, hook.target, ACCEPTED)
        return RewardForm.BATCH, method
    signature = Signature.of(hook.target)
    if _COMPLETIONS in inspect.signature(hook.target).parameters:
        if group_rm:
            raise ConfigError(f"hook {hook.path} takes completions, which are those of a group: leave --group-rm out")
        return RewardForm.COMPLETIONS, hook.target
    if len(signature.required) != 2 or signature.required_keywords:
        raise wrong_signature(hook.path, hook.target, ACCEPTED)
    if signature.required[1] == "samples" and not group_rm:
        raise ConfigError(f"hook {hook.path} takes a list of samples: add --group-rm, or take one `sample`")
    if signature.required[1] == "sample" and group_rm:
        raise ConfigError(f"hook {hook.path} takes one sample: leave --group-rm out, or take a list of `samples`")
    return (RewardForm.GROUP if group_rm else RewardForm.SAMPLE), hook.target


def _columns(path: str, target: Any, args: HookArgs, samples: Sequence[Sample]) -> dict[str, Any]:
    """The arguments that TRL would give: the columns of the prompts' rows as lists, one entry a sample.

    The columns are the label, by the name of its key, and the entries of metadata. A prompt of messages has its
    completion as messages. Raises InvalidArgument naming a column that the function requires and no row has.
    """
    columns: dict[str, list[Any]] = {
        "prompts": [sample.prompt for sample in samples],
        _COMPLETIONS: [_completion(sample) for sample in samples],
        "completion_ids": [sample.tokens[len(sample.tokens) - sample.response_length :] for sample in samples],
    }
    names = dict.fromkeys(name for sample in samples for name in sample.metadata)
    columns = {name: [sample.metadata.get(name) for sample in samples] for name in names} | columns
    labels = [sample.label for sample in samples]
    parameters = inspect.signature(target).parameters.values()
    named = {p.name for p in parameters}
    of_trainer = {name: value for name, value in _OF_TRAINER.items() if name in named}
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in _NAMED and p.name not in columns | of_trainer
    ]
    key = str(args.get("label_key") or "label").rpartition(".")[2]
    if required and key not in required and any(label is not None for label in labels):
        key = required[0]  # the one column that only the label can be
    columns.setdefault(key, labels)
    if missing := [name for name in required if name not in columns]:
        raise InvalidArgument(
            f"hook {path} requires the column {missing[0]!r}, and the rows have {', '.join(columns)}: name the column "
            "with --label-key, or put it into the rows' metadata"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return of_trainer | {name: values for name, values in columns.items() if takes_all or name in named}


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    is_chat = isinstance(sample.prompt, list)
    return [{"role": "assistant", "content": sample.response}] if is_chat else sample.response


@cache
def _model(path: str, model_path: str | None) -> Any:
    if model_path is None:
        raise ConfigError(f"hook {path} is a class made with a model's folder: set --reward-model-path")
    return load_hook(path).target(model_path)


def checked_reward(path: str, reward: Any) -> Reward | NoReward:
    """Converts a hook's return to a plain number or a dict of them, or says why it is not a reward.

    A dict may hold other values too, such as the extracted answer as text. They are left out.
    """
    try:
        if not isinstance(reward, dict):
            return _number(reward)
        numbers = {name: part for name, part in reward.items() if _is_number(part)}
        if not numbers:
            raise InvalidArgument(f"the dict {reward!r:.80} without a number")
        require_at_most(len(numbers), MAX_TAGS, "its parts")
        return {_name(name): _number(part) for name, part in numbers.items()}
    except InvalidArgument as error:
        return f"hook {path} returned {error.message}; a reward is a finite number or a dict of them"


def _is_number(value: Any) -> bool:
    """False for an array or a tensor of several numbers too, which has a `__float__` that fails."""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return False
    return math.prod(getattr(value, "shape", ())) == 1


def _number(value: Any) -> float:
    if not _is_number(value):
        raise InvalidArgument(_shown(value))
    try:
        number = float(value)
    except Exception as error:  # user code converts itself
        raise InvalidArgument(f"a {type(value).__name__} that is no number ({type(error).__name__})") from error
    if not abs(number) <= MAX_REWARD:  # nor is NaN
        raise InvalidArgument(
            f"{number}, beyond the {MAX_REWARD:g} that a reward may be" if number == number else "nan"
        )
    return number


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"a dict with the key {_shown(name)}, not a name")
    check_text("a part's name", name)
    return require_name(name, "a part's name")


def _shown(value: Any) -> str:
    return repr(value)[:80] if value is None or type(value) in (str, bytes, bool, int) else f"a {type(value).__name__}"
