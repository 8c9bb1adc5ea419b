"""A rollout function, tried on two groups of one question."""

from __future__ import annotations

from headrace.errors import InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.convert import from_hook
from headrace.hooks.finished import require_finished
from headrace.hooks.load import Hook
from headrace.hooks.rollout import messages
from headrace.hooks.rollout.function import roll_out
from headrace.hooks.sample import Sample
from headrace.hooks.signature import Signature

_GROUPS = 2
_SAMPLES = 2


class _OneLedger:
    """Lets out two groups, and counts how groups end."""

    def __init__(self) -> None:
        self.left = _GROUPS
        self.returned: list[messages.MadeGroup] = []
        self.others = 0

    def ask(self, order: messages.Order) -> messages.Reply:
        match order:
            case messages.GetSamples(count):
                if not self.left:
                    return messages.OrderRefused(f"the trial has {_GROUPS} groups, which is args.rollout_batch_size")
                numbers = range(_GROUPS - self.left, _GROUPS - self.left + min(count, self.left))
                self.left -= len(numbers)
                return messages.Groups([messages.LeasedGroup(number, _prompts(number)) for number in numbers])
            case messages.ReturnSamples(group):
                self.returned.append(group)
            case messages.FailSamples(_, why):
                raise InvalidArgument(why)
            case _:
                self.others += 1
        return messages.OrderDone()


def is_rollout(hook: Hook) -> bool:
    """True for the argument names of slime's rollout functions."""
    return {"rollout_id", "data_source"} <= set(Signature.of(hook.target).required)


async def try_rollout(path: str, args: HookArgs) -> str:
    """Describes what became of two groups. Runs in a worker. Raises InvalidArgument for untrainable ones."""
    ledger = _OneLedger()
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    sizes = {"rollout_batch_size": _GROUPS, "over_sampling_batch_size": _GROUPS, "n_samples_per_prompt": _SAMPLES}
    report = await roll_out(path, HookArgs({**args, **sizes}), 0, params, ledger.ask)
    if report.unusable:
        raise InvalidArgument(report.unusable[0])
    samples = [sample for group in ledger.returned for place in group.samples for sample in place]
    for number, sample in enumerate(samples):
        require_finished(path, sample)
        from_hook(sample, sample_id=f"check/{number}", group_id="check", index=number)
    if not samples:
        raise InvalidArgument(f"hook {path} returned none of {_GROUPS} groups")
    tokens = sum(sample.response_length for sample in samples)
    scored = " with their rewards" if all(sample.reward is not None for sample in samples) else ""
    return (
        f"returns {len(ledger.returned)} of {_GROUPS} groups{scored}: {len(samples)} samples, {tokens} response tokens"
    )


def _prompts(number: int) -> list[Sample]:
    return [
        Sample(group_index=number, index=place, prompt="What is 3 + 4?", label="7", session_id=f"{number}/{place}")
        for place in range(_SAMPLES)
    ]
