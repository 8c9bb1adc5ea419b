"""The contract test of a user's hook: loads it and tries it on sample data, before a job is started."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.agent import is_agent, require_agent
from headrace.hooks.args import HookArgs, default_args
from headrace.hooks.buffer_filter import load_buffer_filter
from headrace.hooks.data_source.worker import load_data_source
from headrace.hooks.filter import is_all_samples, load_all_samples, load_filter, load_sample_hook
from headrace.hooks.generate import takes_group
from headrace.hooks.load import Hook, Signature, load_hook
from headrace.hooks.reward import reward_hook
from headrace.hooks.rollout.function import rollout_hook
from headrace.hooks.sample import Sample
from headrace.hooks.trainer import trainer_hook, trainer_kind
from headrace.hooks.trial.dry_run import answer_tokens, dry_run
from headrace.hooks.trial.stand_in import stand_in_engine, write_stand_in_model
from headrace.job.hook_files import TRAINER_FORMS
from headrace.process.workers import WorkerError, WorkerPool

_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "reward": partial(reward_hook, group_rm=False),
    "group_reward": partial(reward_hook, group_rm=True),
    "generate": lambda path: takes_group(load_hook(path)),
    "rollout": rollout_hook,
    "agent": require_agent,
    "filter": load_filter,
    "buffer_filter": load_buffer_filter,
    "data_source": load_data_source,
    "all_samples": load_all_samples,
    "sample_hook": load_sample_hook,
    **{kind: partial(trainer_hook, kind=kind) for kind in TRAINER_FORMS},
}
"""By kind; each raises ConfigError for a hook that cannot be called as that kind is."""
KINDS: Sequence[str] = tuple(_LOADERS)
_SECONDS = 120.0
_TURNS = 3
"""`args.max_turns` where no job says it: functions loop over its range."""


@dataclass
class CheckReport:
    """The trials in order, passed and failed."""

    path: str
    kind: str | None = None
    version: str | None = None
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed


def check_hook(
    path: str, kind: str | None = None, args: HookArgs | None = None, reward_model_path: str | None = None
) -> CheckReport:
    """Loads the hook in a worker process, recognises its kind unless given, and calls it on samples.

    Generate functions and agents ask an engine that stands in for the real one, with the job's tokenizer where it is
    here. A reward class is made with `reward_model_path`, else with the job's, else with an empty folder. Of most of
    the trainer's hooks the signature alone is checked: calling them needs a model. A filter takes what a group's
    reward takes, so it has to be named.
    """
    return asyncio.run(_check(path, kind, args or HookArgs({**default_args(), "max_turns": _TURNS}), reward_model_path))


async def _check(path: str, kind: str | None, args: HookArgs, reward_model_path: str | None) -> CheckReport:
    report = CheckReport(path, kind)
    pool, name, is_class = WorkerPool(1), f"hook {path}", False
    try:
        found = await pool.run(recognise, path, kind, timeout_seconds=_SECONDS, name=name)
        report.kind, report.version, is_class = found
        report.passed.append(f"loads, and is {_article(report.kind)}")
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as empty:
            folder = reward_model_path or args.reward_model_path or empty
            tried = HookArgs({**args, "reward_model_path": folder})
            report.passed.append(await tried_in(pool, report.path, report.kind, tried))
    except WorkerError as error:
        report.failed.append(error.message)
        if is_class and report.kind in ("reward", "group_reward") and not (reward_model_path or args.reward_model_path):
            report.failed.append(
                "it was made with an empty folder: name its own with --reward-model-path FOLDER or --job JOB.toml"
            )
    finally:
        await pool.close()
    return report


async def tried_in(
    pool: WorkerPool, path: str, kind: str, args: HookArgs, prompts: Sequence[Sample] | None = None
) -> str:
    """Calls a hook in the pool as `dry_run` does, and describes the result. Raises WorkerError for what fails."""

    async def run(args: HookArgs, session_url: str = "") -> str:
        work = (dry_run, path, kind, args, prompts, session_url)
        told: str = await pool.run(*work, timeout_seconds=_SECONDS, name=f"hook {path}")
        return told

    if kind not in ("generate", "rollout", "agent"):
        return await run(args)
    with tempfile.TemporaryDirectory(prefix="headrace-check-model-") as folder:
        tokens: list[int] | None = None
        if any(Path(args.hf_checkpoint).glob("tokenizer*")):
            tokens = await pool.run(answer_tokens, args, timeout_seconds=_SECONDS, name="the job's tokenizer")
        else:
            write_stand_in_model(Path(folder))
            args = HookArgs({**args, "hf_checkpoint": folder})
        async with stand_in_engine(tokens) as port:
            args = HookArgs({**args, "sglang_router_ip": "127.0.0.1", "sglang_router_port": port})
            return await run(args, f"http://127.0.0.1:{port}/sessions/check")


def _article(kind: str | None) -> str:
    if kind == "agent":
        return "an agent"
    return f"a {kind} {'class' if kind == 'data_source' else 'function'}"


def recognise(path: str, kind: str | None) -> tuple[str, str, bool]:
    """(kind, version, whether it is a class) of the hook. Runs in a worker.

    Raises ConfigError when it is of no kind, or not of the one named.
    """
    hook = load_hook(path)
    kind = kind or _kind_of(hook)
    reasons = []
    for candidate in [kind] if kind else ["reward", "group_reward", "generate"]:
        try:
            _LOADERS[candidate](path)
            return candidate, hook.version, inspect.isclass(hook.target)
        except ConfigError as error:
            reasons.append(error.message)
    raise ConfigError("\n".join(dict.fromkeys(reasons)))


def _kind_of(hook: Hook) -> str | None:
    """The kind that its arguments' names, its method or its own name show; None for rewards, filters, and others."""
    if inspect.isclass(hook.target):
        return "data_source" if hasattr(hook.target, "get_samples") else None
    if is_all_samples(hook):
        return "all_samples"
    signature = Signature.of(hook.target)
    if "buffer" in signature.required:
        return "buffer_filter"
    if (kind := trainer_kind(hook)) is not None:
        return kind
    if {"rollout_id", "data_source"} <= set(signature.required):
        return "rollout"
    if is_agent(hook):
        return "agent"
    # Only generate functions take `evaluation`; others have the names of a group reward's arguments.
    says_so = "generate" in hook.target.__name__ or "rollout" in hook.target.__name__
    takes_evaluation = "evaluation" in (*signature.required, *signature.optional)
    return "generate" if takes_evaluation or says_so else None
