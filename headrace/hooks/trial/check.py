"""The contract test of a user's hook: loads it and tries it on sample data, before a job is started."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
from headrace.hooks.trial.stand_in_engine import ANSWER, stand_in_engine
from headrace.hooks.trial.stand_in_model import write_stand_in_model
from headrace.hooks.trial.whole_batch import try_whole_batch
from headrace.models.tokenizer.tokenizer import load_tokenizer
from headrace.process.workers import WorkerError, WorkerPool

Kind = Literal["reward", "group_reward", "generate", "rollout", "agent"] | LedgerKind | TrainerKind
KINDS: Sequence[Kind] = ("reward", "group_reward", "generate", "rollout", "agent", *LEDGER_KINDS, *TRAINER_FORMS)
_LOAD_SECONDS = 120.0
_TRY_SECONDS = 120.0
_TURNS = 3
"""`args.max_turns` where no job says it: functions loop over its range."""
_PROMPTS = [Sample(index=index, prompt="What is 3 + 4?", label="7") for index in range(2)]


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

    Generate functions and agents ask an engine that stands in for the real one, with the job's tokenizer where it is
    here. A reward class is made with `reward_model_path`, else with the job's, else with an empty folder. Of most of
    the trainer's hooks the signature alone is checked: calling them needs a model. A filter takes what a group's
    reward takes, so it has to be named.
    """
    return asyncio.run(_check(path, kind, args or _args_without_a_job(), reward_model_path))


def _args_without_a_job() -> HookArgs:
    return HookArgs({**default_args(), "max_turns": _TURNS})


async def _check(path: str, kind: Kind | None, args: HookArgs, reward_model_path: str | None) -> CheckReport:
    report = CheckReport(path, kind)
    pool, name = WorkerPool(1), f"hook {path}"
    try:
        report.kind, report.version = await pool.run(recognise, path, kind, timeout_seconds=_LOAD_SECONDS, name=name)
        report.passed.append(f"loads, and is {_article(report.kind)}")
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as empty:
            folder = reward_model_path or args.reward_model_path or empty
            tried = HookArgs({**args, "reward_model_path": folder})
            report.passed.append(await tried_in(pool, report.path, report.kind, tried))
    except WorkerError as error:
        report.failed.append(error.message)
        if report.kind in ("reward", "group_reward") and not (reward_model_path or args.reward_model_path):
            report.failed += await _about_its_folder(pool, path)
    finally:
        await pool.close()
    return report


async def tried_in(
    pool: WorkerPool, path: str, kind: Kind | None, args: HookArgs, prompts: Sequence[Sample] | None = None
) -> str:
    """Calls a hook in the pool on samples, and describes the result. Raises WorkerError for what fails.

    `prompts` are what a generate function or an agent is given; absent: a question of this module.
    """
    name = f"hook {path}"
    match kind:
        case "reward" | "group_reward":
            rewards = await pool.run(try_reward, path, kind, args, timeout_seconds=_TRY_SECONDS, name=name)
            return f"scores {len(rewards)} sample responses: {rewards}"
        case "generate" | "rollout" | "agent":
            return await _generated(pool, path, kind, args, prompts or _PROMPTS)
        case "filter" | "buffer_filter" | "data_source" | "all_samples" | "sample_hook" as ledger:
            told: str = await pool.run(try_ledger, path, ledger, args, timeout_seconds=_TRY_SECONDS, name=name)
            return told
        case "sample_filter" | "reward_post_process" | "train_data" | "rollout_log" | "eval_log" as whole:
            saw: str = await pool.run(try_whole_batch, path, whole, args, timeout_seconds=_TRY_SECONDS, name=name)
            return saw
    return "takes what the trainer gives; it is not called here, for that needs a model"


async def _generated(
    pool: WorkerPool,
    path: str,
    kind: Literal["generate", "rollout", "agent"],
    args: HookArgs,
    prompts: Sequence[Sample],
) -> str:
    with tempfile.TemporaryDirectory(prefix="headrace-check-model-") as folder:
        tokens: list[int] | None = None
        if _has_tokenizer(args):
            tokens = await pool.run(answer_tokens, args, timeout_seconds=_LOAD_SECONDS, name="the job's tokenizer")
        else:
            write_stand_in_model(Path(folder))
            args = HookArgs({**args, "hf_checkpoint": folder})
        async with stand_in_engine(tokens) as port:
            args = HookArgs({**args, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port})
            work: tuple[Any, ...] = (try_generate, path, args, list(prompts))
            if kind == "rollout":
                work = (try_rollout, path, args)
            elif kind == "agent":
                work = (try_agent, path, args, prompts[0], f"http://127.0.0.1:{port}/sessions/check")
            described: str = await pool.run(*work, timeout_seconds=_TRY_SECONDS, name=f"hook {path}")
            return described


def _has_tokenizer(args: HookArgs) -> bool:
    return any(Path(args.hf_checkpoint).glob("tokenizer*"))


def answer_tokens(args: HookArgs) -> list[int]:
    """Runs in a worker: the response of the stand-in engine in the tokens of the job's model."""
    tokenizer = load_tokenizer(Path(args.hf_checkpoint), trust_remote_code=bool(args.get("trust_remote_code")))
    end = tokenizer.eos_token_id
    return [*tokenizer.encode(ANSWER, add_special_tokens=False), *([] if end is None else [end])]


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


async def try_generate(path: str, args: HookArgs, prompts: list[Sample]) -> str:
    """Describes the result for the prompts. Runs in a worker. Raises InvalidArgument for an untrainable one."""
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}
    with _turns_named(args):
        made = await run_generate(path, args, prompts, params, evaluation=False)
    samples = [sample for each in made for sample in each]
    for number, sample in enumerate(samples):
        require_finished(path, sample)
        from_hook(sample, sample_id=f"check/{number}", group_id="check", index=number, rendered_prompt="")
    tokens = sum(sample.response_length for sample in samples)
    trained = sum(sample.effective_response_length for sample in samples)
    scored = " and sets their rewards" if samples[0].reward is not None else ""
    count = f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}"
    return f"makes {len(samples)} samples of {count}{scored}: {tokens} response tokens, {trained} of them trained"


async def try_agent(path: str, args: HookArgs, prompt: Sample, session_url: str) -> str:
    """Describes the result for one prompt. Runs in a worker. Raises what the agent raises."""
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
