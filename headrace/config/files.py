"""Whatever a job names on disk has to be there before anything starts."""

from __future__ import annotations

import ast
import json
from itertools import islice
from pathlib import Path

from headrace.config.job import Job
from headrace.config.prompt_path import PromptPath
from headrace.errors import ConfigError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LINES_LOOKED_AT = 1000


def check_files(job: Job) -> None:
    """Raises ConfigError that names the leaf and the path. Files of services on other machines are theirs to check."""
    _checkpoint("hf_checkpoint", job.model.hf_checkpoint)
    if job.model.ref_load:
        _checkpoint("ref_load", job.model.ref_load)
    if job.data.prompt_data and job.services.buffer_address is None:
        for text in job.data.prompt_data:
            _prompts("prompt_data", PromptPath.parse(text), job)
    if job.services.buffer_address is None:
        _hook("buffer_filter_path", job.buffer.buffer_filter_path)
        _hook("data_source_path", job.data.data_source_path)
    if job.services.rollout_address is None:
        for name, path in job.eval.eval_prompt_data:
            _prompts(f"eval_prompt_data {name}", PromptPath(path), job)
        _hook("custom_generate_function_path", job.rollout.custom_generate_function_path)
        _hook("dynamic_sampling_filter_path", job.rollout.dynamic_sampling_filter_path)
    if job.services.reward_address is None:
        _hook("custom_rm_path", job.reward.custom_rm_path)
    initial = job.checkpoint.initial_megatron_checkpoint
    if initial and not (initial / "manifest.json").is_file():
        raise ConfigError(
            f"initial_megatron_checkpoint {initial} has no manifest.json: name a step-… folder of a headrace run",
            field="initial_megatron_checkpoint",
        )
    for name, path in job.hooks:
        _hook(name, path)
    if job.critic.critic_load:
        _checkpoint("critic_load", job.critic.critic_load)
    if job.distillation.opd_teacher_load:
        _checkpoint("opd_teacher_load", job.distillation.opd_teacher_load)
    if job.checkpoint.load and job.checkpoint.load.exists() and not job.checkpoint.load.is_dir():
        raise ConfigError(f"load {job.checkpoint.load} is not a folder: name the folder of checkpoints", field="load")


def _checkpoint(leaf: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{leaf} {folder} is not a folder: name a Hugging Face model folder", field=leaf)
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(f"tokenizer ({' or '.join(_TOKENIZERS)})")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ConfigError(f"{leaf} {folder} is not a whole model: it has no {', no '.join(missing)}", field=leaf)


def _prompts(leaf: str, part: PromptPath, job: Job) -> None:
    path = part.path
    if not path.is_file():
        raise ConfigError(f"{leaf} {path} does not exist", field=leaf)
    if path.suffix == ".parquet":
        return  # the buffer, which has a reader for it, looks into it at its start
    empty = True
    with path.open(encoding="utf-8") as lines:
        for number, line in islice(enumerate(lines, 1), part.first_row, part.end_row):
            if number > part.first_row + _LINES_LOOKED_AT:
                break
            if line.strip():
                empty = False
                if not job.data.skip_bad_lines:
                    _line(leaf, path, number, line, job)
    if empty:
        raise ConfigError(f"{leaf} {path} has no lines", field=leaf)


def _line(leaf: str, path: Path, number: int, line: str, job: Job) -> None:
    where = f"{leaf} {path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error}): mend it, or pass --skip-bad-lines", field=leaf) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON object is wanted, this is {type(row).__name__}", field=leaf)
    for name, key in (("input_key", job.data.input_key), ("label_key", job.data.label_key)):
        if key is not None and key not in row:
            raise ConfigError(f"{where}: no key {key!r} ({name}); the keys are {', '.join(row)}", field=leaf)


def _hook(leaf: str, hook: str | None) -> None:
    """`file.py:fn` is looked into; `pkg.mod.fn` is left to the service that imports it."""
    if hook is None or ".py:" not in hook:
        return
    file, _, function = hook.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(f"{leaf} {hook}: {file} does not exist", field=leaf)
    try:
        body = ast.parse(Path(file).read_text()).body
    except SyntaxError as error:
        raise ConfigError(f"{leaf} {hook}: {file}, line {error.lineno}: {error.msg}", field=leaf) from error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if function not in [node.name for node in body if isinstance(node, kinds)]:
        raise ConfigError(f"{leaf} {hook}: {file} defines no {function}", field=leaf)
