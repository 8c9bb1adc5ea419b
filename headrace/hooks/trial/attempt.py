"""The hooks of the ledger, tried on sample data: dynamic sampling filter, buffer filter, data source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headrace.hooks.all_samples import is_all_samples, load_all_samples, run_all_samples
from headrace.hooks.args import HookArgs
from headrace.hooks.buffer_filter import load_buffer_filter, run_buffer_filter
from headrace.hooks.convert import from_hook
from headrace.hooks.data_source.worker import load_data_source, try_data_source
from headrace.hooks.filter import load_filter, run_filter
from headrace.hooks.load import Hook
from headrace.hooks.sample import Sample
from headrace.hooks.sample_hook import load_sample_hook, run_sample_hooks
from headrace.hooks.signature import Signature

LedgerKind = Literal["filter", "buffer_filter", "data_source", "all_samples", "sample_hook"]
_LOADERS: Mapping[LedgerKind, Callable[[str], Any]] = {
    "filter": load_filter,
    "buffer_filter": load_buffer_filter,
    "data_source": load_data_source,
    "all_samples": load_all_samples,
    "sample_hook": load_sample_hook,
}
LEDGER_KINDS: Sequence[LedgerKind] = tuple(_LOADERS)
_PROMPTS = 4


def require_ledger_hook(path: str, kind: LedgerKind) -> None:
    """Raises ConfigError unless it can be called as the ledger or the producers call it."""
    _LOADERS[kind](path)


def ledger_kind(hook: Hook) -> LedgerKind | None:
    """A class that gives samples, or a function that is shown the buffer; None for all others, filters included."""
    if inspect.isclass(hook.target):
        return "data_source" if hasattr(hook.target, "get_samples") else None
    if is_all_samples(hook):
        return "all_samples"
    return "buffer_filter" if "buffer" in Signature.of(hook.target).required else None


async def try_ledger(path: str, kind: LedgerKind, args: HookArgs) -> str:
    """Describes what the hook did. Runs in a worker.

    Raises the hook's exception, and InvalidArgument when it returns something of the wrong type.
    """
    match kind:
        case "filter":
            told = [await _filtered(path, args, rewards) for rewards in ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))]
            return f"of groups with different and with equal rewards: {', '.join(told)}"
        case "buffer_filter":
            groups = [_packed(place) for place in range(3)]
            chosen, dropped = await run_buffer_filter(path, args, 0, groups, 2)
            return f"chooses {len(chosen)} of 3 groups for a batch of 2, and drops {len(dropped)}"
        case "all_samples":
            await run_all_samples(path, args, [sample_answers(), sample_answers()])
            return "takes the samples of two groups"
        case "sample_hook":
            changed = [await run_sample_hooks((path,), args, sample, False) for sample in sample_answers()]
            for sample in changed:
                from_hook(sample, sample_id="check", group_id="check", index=0)
            return f"keeps or changes {len(changed)} samples"
        case "data_source":
            return f"gives {len(try_data_source(path, args, _PROMPTS))} prompts when asked for {_PROMPTS}"


def sample_answers() -> list[Sample]:
    """A right, a wrong, an empty and a cut answer to one prompt."""
    answers = [("7", Sample.Status.COMPLETED), ("The answer is 8.", Sample.Status.COMPLETED)]
    answers += [("", Sample.Status.COMPLETED), ("Let me think: 3 + 4", Sample.Status.TRUNCATED)]
    return [
        Sample(
            group_index=0,
            index=index,
            prompt="What is 3 + 4?",
            tokens=list(range(1, 6 + len(response.split()))),
            response=response,
            response_length=len(response.split()),
            rollout_log_probs=[-0.5] * len(response.split()),
            label="7",
            status=status,
            metadata={},
        )
        for index, (response, status) in enumerate(answers)
    ]


async def _filtered(path: str, args: HookArgs, rewards: Sequence[float]) -> str:
    samples = sample_answers()
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward if args.reward_key is None else {args.reward_key: reward}
    keep, reason = await run_filter(path, args, samples)
    return "kept" if keep else f"dropped ({reason or 'no reason given'})"


def _packed(place: int) -> list[bytes]:
    return [
        from_hook(sample, sample_id=f"{place}/{sample.index}", group_id=str(place), index=sample.index or 0)
        .pack()
        .SerializeToString()
        for sample in sample_answers()
    ]
