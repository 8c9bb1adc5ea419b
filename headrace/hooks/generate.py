"""Generate hooks: a user's function that plays the policy against a prompt, in both of the forms in use."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import plain
from headrace.hooks.kit.conversation import Call, attach_tokens, calling
from headrace.hooks.load import Hook, Signature, awaited, load_hook, takes, wrong_signature
from headrace.hooks.reward import checked_reward
from headrace.hooks.sample import Sample
from headrace.images import open_image

ACCEPTED = (
    "async def f(args, samples, evaluation=False) -> list[Sample]",
    "async def f(args, sample, sampling_params, evaluation=False) -> Sample | list[Sample]",
)


def takes_group(hook: Hook) -> bool:
    """True for the form that takes a list of samples. Raises ConfigError unless it is one of the two."""
    signature = Signature.of(hook.target)
    required = tuple(name for name in signature.required if name != "evaluation")
    if len(required) not in (2, 3) or signature.required_keywords or inspect.isclass(hook.target):
        raise wrong_signature(hook.path, hook.target, ACCEPTED)
    return len(required) == 2


def generate_form(path: str) -> str:
    """Runs in a worker: what one call is given. Raises ConfigError for what cannot be loaded or called."""
    return "all samples of a group" if takes_group(load_hook(path)) else "one sample"


async def run_generate(
    path: str, args: HookArgs, samples: Sequence[Sample], sampling_params: Mapping[str, Any], evaluation: bool
) -> list[list[Sample]]:
    """The samples that came of each sample given, in order. Runs in a worker. Raises InvalidArgument on other returns.

    A group form may fan out; what it returns is then given as one list under the first sample.
    """
    hook = load_hook(path)
    options = {"evaluation": evaluation} if takes(hook, "evaluation") else {}
    if takes_group(hook):
        with calling(Call(args, samples, sampling_params)) as call:
            made = await awaited(hook.target(args, [_opened(sample) for sample in samples], **options))
        flat = _samples(path, made, call)
        return [[one] for one in flat] if len(flat) == len(samples) else [flat, *([] for _ in samples[1:])]
    results = []
    for sample in samples:
        with calling(Call(args, [sample], sampling_params)) as call:
            made = await awaited(hook.target(args, _opened(sample), copy.deepcopy(dict(sampling_params)), **options))
        results.append(_samples(path, made if isinstance(made, list) else [made], call))
    return results


def _opened(sample: Sample) -> Sample:
    """A function has images as slime gives them: opened by Pillow."""
    if not sample.multimodal_inputs:
        return sample
    opened = {kind: [open_image(file) for file in files] for kind, files in sample.multimodal_inputs.items()}
    return replace(sample, multimodal_inputs=opened)


def _samples(path: str, made: Any, call: Call) -> list[Sample]:
    if not isinstance(made, list):
        raise InvalidArgument(f"hook {path} returned {type(made).__name__}; it must return Sample or list[Sample]")
    flat = [one for item in made for one in (item if isinstance(item, list) else [item])]
    strangers = {type(one).__name__ for one in flat if not isinstance(one, Sample)}
    if strangers or not flat:
        raise InvalidArgument(
            f"hook {path} returned a list of {sorted(strangers) or 'nothing'}; it must hold at least one Sample"
        )
    return [sendable(path, attach_tokens(one, call)) for one in flat]


def sendable(path: str, sample: Sample) -> Sample:
    """Returns the sample as it leaves the worker. Raises InvalidArgument for a reward that is none."""
    if sample.reward is not None:
        reward = checked_reward(path, sample.reward)
        if isinstance(reward, str):
            raise InvalidArgument(f"sample.reward: {reward}")
        sample = replace(sample, reward=reward)
    return plain(sample)
