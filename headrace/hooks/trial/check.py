"""The contract test of a user's hook: loads it and tries it on sample data, before a job is started."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.agent import Task, is_agent, require_agent, run_agent
from headrace.hooks.args import HookArgs, default_args
from headrace.hooks.convert import from_hook
from headrace.hooks.finished import require_finished
from headrace.hooks.generate import run_generate, takes_group
from headrace.hooks.load import Hook, load_hook
from headrace.hooks.reward import Reward, RewardForm, reward_hook, run_reward
from headrace.hooks.rollout.function import rollout_hook
from headrace.hooks.sample import Sample
from headrace.hooks.signature import Signature
from headrace.hooks.trainer import TRAINER_FORMS, TrainerKind, trainer_hook, trainer_kind
from headrace.hooks.trial.attempt import (
    LEDGER_KINDS,
    LedgerKind,
    ledger_kind,
    require_ledger_hook,
    sample_answers,
    try_ledger,
)
from headrace.hooks.trial.rollout import is_rollout, try_rollout
from headrace.hooks.trial.stand_in_engine import stand_in_engine
from headrace.hooks.trial.whole_batch import try_whole_batch
from headrace.process.workers import WorkerError, WorkerPool

Kind = Literal["reward", "group_reward", "generate", "rollout", "agent"] | LedgerKind | TrainerKind
KINDS: Sequence[Kind] = ("reward", "group_reward", "generate", "rollout", "agent", *LEDGER_KINDS, *TRAINER_FORMS)
_LOAD_SECONDS = 60.0
_TRY_SECONDS = 30.0


@dataclass
class CheckReport:
    """The trials in order, passed and failed."""

    path: str
    kind: Kind | None = None
    version: str | None = None
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when nothing failed."""
        return not self.failed


def check_hook(
    path: str, kind: Kind | None = None, args: HookArgs | None = None, reward_model_path: str | None = None
) -> CheckReport:
    """Loads the hook in a worker process, recognises its kind unless given, and calls it on samples.

    A generate function asks an engine that stands in for the real one. A reward class is made with `reward_model_path`,
    else with the job's, else with an empty folder. Of most of the trainer's hooks the signature alone is checked:
    calling them needs a model. A filter takes what a group's reward takes, so it has to be named.
    """
    return asyncio.run(_check(path, kind, args or default_args(), reward_model_path))


async def _check(path: str, kind: Kind | None, args: HookArgs, reward_model_path: str | None) -> CheckReport:
    report = CheckReport(path, kind)
    pool, name = WorkerPool(1), f"hook {path}"
    try:
        report.kind, report.version = await pool.run(recognise, path, kind, timeout_seconds=_LOAD_SECONDS, name=name)
        report.passed.append(f"loads, and is {_article(report.kind)}")
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as empty:
            folder = reward_model_path or args.reward_model_path or empty
            tried = HookArgs({**args, "reward_model_path": folder})
            report.passed.append(await _tried(pool, report, tried, name))
    except WorkerError as error:
        report.failed.append(error.message)
        if report.kind in ("reward", "group_reward") and not (reward_model_path or args.reward_model_path):
            report.failed += await _about_its_folder(pool, path)
    finally:
        await pool.close()
    return report


async def _tried(pool: WorkerPool, report: CheckReport, args: HookArgs, name: str) -> str:
    path = report.path
    match report.kind:
        case "reward" | "group_reward" as kind:
            rewards = await pool.run(try_reward, path, kind, args, timeout_seconds=_TRY_SECONDS, name=name)
            return f"scores {len(rewards)} sample responses: {rewards}"
        case "generate":
            async with stand_in_engine() as port:
                args = HookArgs({**args, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port})
                made: str = await pool.run(try_generate, path, args, timeout_seconds=_TRY_SECONDS, name=name)
                return made
        case "rollout":
            async with stand_in_engine() as port:
                args = HookArgs({**args, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port})
                rolled: str = await pool.run(try_rollout, path, args, timeout_seconds=_TRY_SECONDS, name=name)
                return rolled
        case "agent":
            async with stand_in_engine() as port:
                played = (path, args, f"http://127.0.0.1:{port}/sessions/check")
                said: str = await pool.run(try_agent, *played, timeout_seconds=_TRY_SECONDS, name=name)
                return said
        case "filter" | "buffer_filter" | "data_source" | "all_samples" | "sample_hook" as ledger:
            told: str = await pool.run(try_ledger, path, ledger, args, timeout_seconds=_TRY_SECONDS, name=name)
            return told
        case "sample_filter" | "reward_post_process" | "train_data" | "rollout_log" | "eval_log" as whole:
            saw: str = await pool.run(try_whole_batch, path, whole, args, timeout_seconds=_TRY_SECONDS, name=name)
            return saw
    return "takes what the trainer gives; it is not called here, for that needs a model"


async def _about_its_folder(pool: WorkerPool, path: str) -> list[str]:
    """A hint, where a class failed that was made with an empty folder."""
    if not await pool.run(is_class, path, timeout_seconds=_LOAD_SECONDS):
        return []
    return ["it was made with an empty folder: name its own with --reward-model-path FOLDER or --job JOB.toml"]


def is_class(path: str) -> bool:
    """Runs in a worker."""
    return inspect.isclass(load_hook(path).target)


def _article(kind: Kind | None) -> str:
    if kind == "agent":
        return "an agent"
    return f"a {kind} {'class' if kind == 'data_source' else 'function'}"


def recognise(path: str, kind: Kind | None) -> tuple[Kind, str]:
    """(kind, version) of the hook. Raises ConfigError when it is of no kind, or not of the one named."""
    hook = load_hook(path)
    kind = kind or ledger_kind(hook) or trainer_kind(hook) or _rolls_out(hook) or _plays(hook) or _generates(hook)
    kinds: Sequence[Kind] = (kind,) if kind else ("reward", "group_reward", "generate")
    reasons = []
    for candidate in kinds:
        try:
            if candidate == "generate":
                takes_group(hook)
            elif candidate == "rollout":
                rollout_hook(path)
            elif candidate == "agent":
                require_agent(path)
            elif candidate == "reward" or candidate == "group_reward":
                reward_hook(path, group_rm=candidate == "group_reward")
            elif (
                candidate == "filter"
                or candidate == "buffer_filter"
                or candidate == "data_source"
                or candidate == "all_samples"
                or candidate == "sample_hook"
            ):
                require_ledger_hook(path, candidate)
            else:
                trainer_hook(path, candidate)
            return candidate, hook.version
        except ConfigError as error:
            reasons.append(error.message)
    raise ConfigError("\n".join(dict.fromkeys(reasons)))


def _rolls_out(hook: Hook) -> Literal["rollout"] | None:
    return "rollout" if is_rollout(hook) else None


def _plays(hook: Hook) -> Literal["agent"] | None:
    return "agent" if is_agent(hook) else None


def _generates(hook: Hook) -> Literal["generate"] | None:
    """True with `evaluation`, which only generate functions take, or when the arguments have a group reward's names."""
    if inspect.isclass(hook.target):
        return None
    signature = Signature.of(hook.target)
    says_so = "generate" in hook.target.__name__ or "rollout" in hook.target.__name__
    takes_evaluation = "evaluation" in (*signature.required, *signature.optional)
    return "generate" if takes_evaluation or says_so else None


async def try_generate(path: str, args: HookArgs) -> str:
    """Describes the result for two prompts. Runs in a worker. Raises InvalidArgument for an untrainable one."""
    prompts = [Sample(index=index, prompt="What is 3 + 4?", label="7") for index in range(2)]
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    made = await run_generate(path, args, prompts, params, evaluation=False)
    samples = [sample for each in made for sample in each]
    for number, sample in enumerate(samples):
        require_finished(path, sample)
        from_hook(sample, sample_id=f"check/{number}", group_id="check", index=number)
    tokens = sum(sample.response_length for sample in samples)
    trained = sum(sample.effective_response_length for sample in samples)
    scored = " and sets their rewards" if samples[0].reward is not None else ""
    return f"makes {len(samples)} samples of 2 prompts{scored}: {tokens} response tokens, {trained} of them trained"


async def try_agent(path: str, args: HookArgs, session_url: str) -> str:
    """Describes the result for one prompt. Runs in a worker. Raises what the agent raises."""
    reward = await run_agent(path, args, Task("What is 3 + 4?", "7"), session_url)
    return (
        "plays a prompt, and leaves its reward to the scorer" if reward is None else f"plays a prompt: reward {reward}"
    )


async def try_reward(path: str, kind: Kind, args: HookArgs) -> list[Reward]:
    """The rewards of a right, a wrong, an empty and a cut answer. Raises what the hook raises."""
    form = reward_hook(path, group_rm=kind == "group_reward").form
    samples = sample_answers()
    rewards: list[Reward] = []
    answers = await run_reward(path, form, args, samples)
    may_pass = form is RewardForm.COMPLETIONS and not all(isinstance(reward, str) for reward in answers)
    for sample, reward in zip(samples, answers, strict=True):
        if isinstance(reward, str) and may_pass:
            continue  # TRL's form may leave samples without a reward
        if isinstance(reward, str):
            raise InvalidArgument(reward)
        rewards.append(reward)
        sample.reward = reward
        if form is RewardForm.SAMPLE and args.reward_key is not None:
            sample.get_reward_value(args)
    return rewards
