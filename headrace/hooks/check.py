"""The contract test of a user's hook: loads it and tries it on sample data, before a job is started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.config.job import Job, ModelSection
from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import HookArgs, hook_args
from headrace.hooks.attempt import (
    LEDGER_KINDS,
    LedgerKind,
    ledger_kind,
    require_ledger_hook,
    sample_answers,
    try_ledger,
)
from headrace.hooks.generate import takes_group
from headrace.hooks.load import load_hook
from headrace.hooks.reward import Reward, RewardForm, reward_hook, run_reward
from headrace.hooks.trainer import TRAINER_FORMS, TrainerKind, trainer_hook, trainer_kind
from headrace.workers import WorkerError, WorkerPool

Kind = Literal["reward", "group_reward", "generate"] | LedgerKind | TrainerKind
KINDS: Sequence[Kind] = ("reward", "group_reward", "generate", *LEDGER_KINDS, *TRAINER_FORMS)
_LOAD_SECONDS = 60.0
_TRY_SECONDS = 30.0


@dataclass
class CheckReport:
    """What was tried, in order, and what failed; `ok` when nothing did."""

    path: str
    kind: Kind | None = None
    version: str | None = None
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed


def check_hook(path: str, kind: Kind | None = None, args: HookArgs | None = None) -> CheckReport:
    """Loads the hook in a worker process, recognises its kind unless given, and calls it on sample answers.

    Of a generate hook and of the trainer's hooks the signature is checked: calling them needs an engine or a model.
    A filter takes what a group's reward takes, so it has to be named.
    """
    return asyncio.run(_check(path, kind, args or sample_args()))


async def _check(path: str, kind: Kind | None, args: HookArgs) -> CheckReport:
    report = CheckReport(path, kind)
    pool, name = WorkerPool(1), f"hook {path}"
    try:
        report.kind, report.version = await pool.run(recognise, path, kind, timeout_seconds=_LOAD_SECONDS, name=name)
        what = "class" if report.kind == "data_source" else "function"
        report.passed.append(f"loads, and is a {report.kind} {what}")
        if report.kind in ("reward", "group_reward"):
            rewards = await pool.run(try_reward, path, report.kind, args, timeout_seconds=_TRY_SECONDS, name=name)
            report.passed.append(f"judges {len(rewards)} sample answers: {rewards}")
        elif report.kind in LEDGER_KINDS:
            told = await pool.run(try_ledger, path, report.kind, args, timeout_seconds=_TRY_SECONDS, name=name)
            report.passed.append(told)
    except WorkerError as error:
        report.failed.append(error.message)
    finally:
        await pool.close()
    return report


def recognise(path: str, kind: Kind | None) -> tuple[Kind, str]:
    """(kind, version) of the hook. Raises ConfigError when it is of no kind, or not of the one named."""
    hook = load_hook(path)
    kind = kind or ledger_kind(hook) or trainer_kind(hook)
    kinds: Sequence[Kind] = (kind,) if kind else ("reward", "group_reward", "generate")
    reasons = []
    for candidate in kinds:
        try:
            if candidate == "generate":
                takes_group(hook)
            elif candidate == "reward" or candidate == "group_reward":
                reward_hook(path, group_rm=candidate == "group_reward")
            elif candidate == "filter" or candidate == "buffer_filter" or candidate == "data_source":
                require_ledger_hook(path, candidate)
            else:
                trainer_hook(path, candidate)
            return candidate, hook.version
        except ConfigError as error:
            reasons.append(error.message)
    raise ConfigError("\n".join(dict.fromkeys(reasons)))


async def try_reward(path: str, kind: Kind, args: HookArgs) -> list[Reward]:
    """The rewards of a right, a wrong, an empty and a cut answer. Raises what the hook raises."""
    form = reward_hook(path, group_rm=kind == "group_reward").form
    samples = sample_answers()
    rewards: list[Reward] = []
    for sample, reward in zip(samples, await run_reward(path, form, args, samples), strict=True):
        if isinstance(reward, str):
            raise InvalidArgument(reward)
        rewards.append(reward)
        sample.reward = reward
        if form is RewardForm.SAMPLE and args.reward_key is not None:
            sample.get_reward_value(args)
    return rewards


def sample_args() -> HookArgs:
    """The args of a job with every default."""
    return hook_args(Job(model=ModelSection(hf_checkpoint=Path("model"))))
