"""Calls a user's hook on sample data, each kind as a run calls it. Everything here runs in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import InvalidArgument
from headrace.hooks.agent import Task, run_agent
from headrace.hooks.args import HookArgs
from headrace.hooks.buffer_filter import run_buffer_filter
from headrace.hooks.convert import from_hook, require_finished
from headrace.hooks.data_source.worker import try_data_source
from headrace.hooks.filter import run_all_samples, run_filter, run_sample_hooks
from headrace.hooks.generate import run_generate
from headrace.hooks.load import load_hook
from headrace.hooks.reward import Reward, RewardForm, reward_hook, run_reward
from headrace.hooks.rollout import messages
from headrace.hooks.rollout.function import roll_out
from headrace.hooks.sample import Sample
from headrace.hooks.trial.stand_in import ANSWER
from headrace.models.tokenizer.tokenizer import load_tokenizer

_QUESTION = "What is 3 + 4?"
_GROUPS = 2
_SAMPLES = 2
_PROMPTS = 4


async def dry_run(
    path: str, kind: str, args: HookArgs, prompts: Sequence[Sample] | None = None, session_url: str = ""
) -> str:
    """Describes what the hook did.

    `prompts` are what a generate function or an agent is given; absent: a question of this module. An agent plays
    against `session_url`. Raises the hook's exception, and InvalidArgument for a result that a run could not use.
    """
    prompts = prompts or [Sample(index=index, prompt=_QUESTION, label="7") for index in range(2)]
    match kind:
        case "reward" | "group_reward":
            rewards = await _rewards(path, kind, args)
            return f"scores {len(rewards)} sample responses: {rewards}"
        case "generate":
            return await _generated(path, args, prompts)
        case "rollout":
            return await _rolled_out(path, args)
        case "agent":
            return await _played(path, args, prompts[0], session_url)
        case "filter" | "buffer_filter" | "all_samples" | "sample_hook" | "data_source":
            return await _of_the_ledger(path, kind, args)
    return _of_the_trainer(path, kind, args)


async def _of_the_ledger(path: str, kind: str, args: HookArgs) -> str:
    match kind:
        case "filter":
            told = [await _filtered(path, args, rewards) for rewards in ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))]
            return f"of groups with different and with equal rewards: {', '.join(told)}"
        case "buffer_filter":
            chosen, dropped = await run_buffer_filter(path, args, 0, [_packed(place) for place in range(3)], 2)
            return f"chooses {len(chosen)} of 3 groups for a batch of 2, and drops {len(dropped)}"
        case "all_samples":
            await run_all_samples(path, args, [sample_answers(), sample_answers()])
            return "takes the samples of two groups"
        case "sample_hook":
            changed = [await run_sample_hooks((path,), args, sample, False) for sample in sample_answers()]
            for sample in changed:
                from_hook(sample, sample_id="check", group_id="check", index=0)
            return f"keeps or changes {len(changed)} samples"
    return f"gives {len(try_data_source(path, args, _PROMPTS))} prompts when asked for {_PROMPTS}"


def _of_the_trainer(path: str, kind: str, args: HookArgs) -> str:
    target, samples = load_hook(path).target, _scored_answers()
    match kind:
        case "sample_filter":
            target(args, [samples])
            return f"leaves {sum(sample.remove_sample for sample in samples)} of {len(samples)} samples out of the loss"
        case "reward_post_process":
            made = target(args, samples)
            if not isinstance(made, tuple) or len(made) != 2 or any(len(part) != len(samples) for part in made):
                raise InvalidArgument(
                    f"hook {path} must return two lists of {len(samples)} numbers: raw rewards, rewards"
                )
            return f"makes {list(made[1])} of the rewards {list(made[0])}"
        case "train_data":
            made = target(args, samples)
            if not isinstance(made, Mapping) or len(made.get("rewards", ())) != len(samples):
                raise InvalidArgument(f"hook {path} must return a dict with rewards, a list of {len(samples)}")
            return f"converts {len(samples)} samples: rewards {list(made['rewards'])}"
        case "rollout_log":
            metrics: dict[str, Any] = {}
            return _logged(target(0, args, samples, metrics, 1.0), metrics)
        case "eval_log":
            rewards, truncated = [s.reward for s in samples], [s.status is Sample.Status.TRUNCATED for s in samples]
            metrics = {}
            data = {"check": {"rewards": rewards, "truncated": truncated, "samples": samples}}
            return _logged(target(0, args, data, metrics), metrics)
    return "takes what the trainer gives; it is not called here, for that needs a model"


def answer_tokens(args: HookArgs) -> list[int]:
    """The response of the stand-in engine in the tokens of the job's model."""
    tokenizer = load_tokenizer(Path(args.hf_checkpoint), trust_remote_code=bool(args.get("trust_remote_code")))
    end = tokenizer.eos_token_id
    return [*tokenizer.encode(ANSWER, add_special_tokens=False), *([] if end is None else [end])]


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


def _scored_answers() -> list[Sample]:
    samples = sample_answers()
    for number, sample in enumerate(samples):
        sample.reward = float(number == 0)
        sample.tokens = list(range(2 + sample.response_length))
    return samples


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


def _logged(alone: object, metrics: Mapping[str, Any]) -> str:
    named = ", ".join(metrics) or "no metrics of its own"
    return f"logs {'alone' if alone else 'beside headrace'}, with {named}"


async def _generated(path: str, args: HookArgs, prompts: Sequence[Sample]) -> str:
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    with _turns_named(args):
        made = await run_generate(path, args, list(prompts), params, evaluation=False)
    samples = [sample for each in made for sample in each]
    tokens = _require_trainable(path, samples, rendered_prompt="")
    trained = sum(sample.effective_response_length for sample in samples)
    scored = " and sets their rewards" if samples[0].reward is not None else ""
    count = f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}"
    return f"makes {len(samples)} samples of {count}{scored}: {tokens} response tokens, {trained} of them trained"


def _require_trainable(path: str, samples: Sequence[Sample], rendered_prompt: str | None = None) -> int:
    """Returns the number of response tokens. Raises InvalidArgument for a sample that a run could not store."""
    for number, sample in enumerate(samples):
        require_finished(path, sample)
        from_hook(sample, sample_id=f"check/{number}", group_id="check", index=number, rendered_prompt=rendered_prompt)
    return sum(sample.response_length for sample in samples)


async def _played(path: str, args: HookArgs, prompt: Sample, session_url: str) -> str:
    with _turns_named(args):
        reward = await run_agent(path, args, Task(prompt.prompt, prompt.label, prompt.metadata), session_url)
    return (
        "plays a prompt, and leaves its reward to the scorer" if reward is None else f"plays a prompt: reward {reward}"
    )


@contextmanager
def _turns_named(args: HookArgs) -> Iterator[None]:
    """Functions loop over `range(args.max_turns)`, which is None where the job sets no limit."""
    try:
        yield
    except TypeError as error:
        if args.get("max_turns") is not None or "NoneType" not in str(error):
            raise
        raise InvalidArgument(f"TypeError: {error}; args.max_turns is None: give the job --max-turns N") from error


async def _rewards(path: str, kind: str, args: HookArgs) -> list[Reward]:
    """The rewards of a right, a wrong, an empty and a cut answer. Raises what the hook raises."""
    form = reward_hook(path, group_rm=kind == "group_reward").form
    samples = sample_answers()
    rewards: list[Reward] = []
    answers = await run_reward(path, form, args, samples)
    if all(reward is None for reward in answers):
        raise InvalidArgument(
            f"hook {path} returned None for every sample; a reward is a finite number or a dict of them"
        )
    for sample, reward in zip(samples, answers, strict=True):
        if reward is None:
            continue  # it abstains
        if isinstance(reward, str):
            raise InvalidArgument(reward)
        rewards.append(reward)
        sample.reward = reward
        if form is RewardForm.SAMPLE and args.reward_key is not None:
            sample.get_reward_value(args)
    return rewards


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


async def _rolled_out(path: str, args: HookArgs) -> str:
    ledger = _OneLedger()
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    sizes = {"rollout_batch_size": _GROUPS, "over_sampling_batch_size": _GROUPS, "n_samples_per_prompt": _SAMPLES}
    report = await roll_out(path, HookArgs({**args, **sizes}), 0, params, ledger.ask)
    if report.unusable:
        raise InvalidArgument(report.unusable[0])
    samples = [sample for group in ledger.returned for place in group.samples for sample in place]
    if not samples:
        raise InvalidArgument(f"hook {path} returned none of {_GROUPS} groups")
    tokens = _require_trainable(path, samples)
    scored = " with their rewards" if all(sample.reward is not None for sample in samples) else ""
    return (
        f"returns {len(ledger.returned)} of {_GROUPS} groups{scored}: {len(samples)} samples, {tokens} response tokens"
    )


def _prompts(number: int) -> list[Sample]:
    return [
        Sample(group_index=number, index=place, prompt="What is 3 + 4?", label="7", session_id=f"{number}/{place}")
        for place in range(_SAMPLES)
    ]
