"""Checks the files that a job names, before anything starts. Each service checks more of its own part."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ConfigError, InvalidArgument
from headrace.job.eval_sets import eval_sets
from headrace.job.rules.paths.hook_files import definitions, refuse_slimes
from headrace.job.rules.paths.weight_folders import check_model, check_starting_weights, check_weights
from headrace.job.rules.scope import Scope
from headrace.job.schema.job import Job
from headrace.job.schema.section import PromptPath
from headrace.prompts import parse_row, rows_of, value_at

_LINES_LOOKED_AT = 1000


def check_files(job: Job, scope: Scope) -> None:
    """Raises ConfigError that names the option and the path."""
    for service in scope.services:
        _python(job, service, scope)
    if "trainer" in scope.services or "rollout" in scope.services:
        check_model("hf_checkpoint", job.model.hf_checkpoint, scope)
    if "buffer" in scope.services:
        _of_buffer(job, scope)
    if "rollout" in scope.services:
        _of_rollout(job, scope)
    if "reward" in scope.services:
        _of_reward(job, scope)
    if "trainer" in scope.services:
        _of_trainer(job, scope)


def _python(job: Job, service: str, scope: Scope) -> None:
    option = f"{service}_python"
    try:
        words = job.services.python_of(service)
    except ValueError as error:  # shlex's
        raise ConfigError(f"{option}: {error}: close its quotes", field=option) from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else "an empty text"
        scope.missing(ConfigError(f"{option}: {program} is no program here: name a Python interpreter", field=option))


def _of_buffer(job: Job, scope: Scope) -> None:
    for text in job.data.prompt_data:
        _prompts("prompt_data", PromptPath.parse(text), job, scope)
    _hook("buffer_filter_path", job.buffer.buffer_filter_path, scope)
    _hook("data_source_path", job.data.data_source_path, scope)


def _of_rollout(job: Job, scope: Scope) -> None:
    _of_evaluations(job, scope)
    _hook("custom_generate_function_path", job.rollout.custom_generate_function_path, scope)
    _hook("rollout_function_path", job.rollout.rollout_function_path, scope)
    for path in job.rollout.rollout_sample_hook_path:
        _hook("rollout_sample_hook_path", path, scope)
    _hook("rollout_all_samples_process_path", job.rollout.rollout_all_samples_process_path, scope)
    _hook("eval_function_path", job.eval.eval_function_path, scope)
    if not job.rollout.agent_hosts:  # else it is where they are
        _hook("agent_function_path", job.rollout.agent_function_path, scope)
    _hook("dynamic_sampling_filter_path", job.rollout.dynamic_sampling_filter_path, scope)


def _of_evaluations(job: Job, scope: Scope) -> None:
    config = job.eval.eval_config
    if config is not None and not config.is_file():
        scope.missing(ConfigError(f"eval_config {config} does not exist", field="eval_config"), config)
        return
    for each in eval_sets(job.eval):
        label_key = each.label_key or job.eval.eval_label_key or job.data.label_key
        input_key = each.input_key or job.eval.eval_input_key or job.data.input_key
        keys = job.model_copy(
            update={"data": job.data.model_copy(update={"input_key": input_key, "label_key": label_key})}
        )
        _prompts(f"eval_prompt_data {each.name}", each.prompts, keys, scope)
        _hook("custom_generate_function_path", each.custom_generate_function_path, scope)


def _of_reward(job: Job, scope: Scope) -> None:
    _hook("custom_rm_path", job.reward.custom_rm_path, scope)
    prompt = job.reward.judge_prompt
    if prompt is not None and not prompt.is_file():
        scope.missing(
            ConfigError(f"judge_prompt {prompt} is not a file: write one, or leave it out", field="judge_prompt")
        )
    folder = job.reward.reward_model_path
    if folder is not None and not folder.is_dir():
        scope.missing(
            ConfigError(
                f"reward_model_path {folder} is not a folder: name the folder that {job.reward.custom_rm_path} is "
                "constructed with",
                field="reward_model_path",
            )
        )


def _of_trainer(job: Job, scope: Scope) -> None:
    for name, folder in (
        ("ref_load", job.model.ref_load),
        ("critic_load", job.critic.critic_load),
        ("opd_teacher_load", job.distillation.opd_teacher_load),
    ):
        if folder is not None:
            check_weights(name, folder, job, scope)
    check_starting_weights(job, scope)
    for name, path in job.hooks:
        _hook(name, path, scope)


def _prompts(option: str, part: PromptPath, job: Job, scope: Scope) -> None:
    path = part.path
    if not path.is_file():
        scope.missing(ConfigError(f"{option} {path} does not exist", field=option), path)
        return
    if path.suffix == ".parquet":
        return  # the buffer, which has a reader for it, looks into it at its start
    empty = True
    last = part.first_row + _LINES_LOOKED_AT
    last = last if part.end_row is None else min(last, part.end_row)
    with path.open("rb") as file:
        for number, line in _rows(option, file, path):
            if number > last:
                break
            if number > part.first_row:
                empty = False
                if not job.data.skip_bad_lines:
                    _line(option, path, number, line, job)
    if empty:
        raise ConfigError(f"{option} {path} has no lines", field=option)


def _rows(option: str, file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from rows_of(file, path)
    except InvalidArgument as error:
        raise ConfigError(f"{option} {error.message}", field=option) from error


def _line(option: str, path: Path, number: int, line: Any, job: Job) -> None:
    where = f"{option} {path}, line {number}"
    try:
        row = parse_row(line)
    except InvalidArgument as error:
        raise ConfigError(f"{where}: {error.message}: correct it, or pass --skip-bad-lines", field=option) from error
    for name, key in (("input_key", job.data.input_key), ("label_key", job.data.label_key)):
        if key is not None and key not in row and value_at(row, key) is None:
            raise ConfigError(f"{where}: no key {key!r} ({name}); the keys are {', '.join(row)}", field=option)


def _hook(option: str, hook: str | None, scope: Scope) -> None:
    """Looks into `file.py:fn`; the service that imports `pkg.mod.fn` checks it."""
    if hook is None:
        return
    refuse_slimes(option, hook)
    file, _, function = hook.rpartition(":") if ".py:" in hook else (hook, "", "")
    if not file.endswith(".py"):
        return
    if not Path(file).is_file():
        scope.missing(ConfigError(f"{option} {hook}: {file} does not exist", field=option), Path(file))
        return
    if function not in (defined := [node.name for node in definitions(option, Path(file))]):
        there = f": it defines {', '.join(defined)}" if defined else ""
        raise ConfigError(f"{option} {hook}: {file} does not define {function}{there}", field=option)
