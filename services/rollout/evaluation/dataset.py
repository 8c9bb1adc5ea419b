"""A data set to evaluate: its rows, of a JSONL file, a JSON array or CSV, and how each is sampled.

The operator named or allowed the file. It is a regular file of bounded size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, InvalidArgument
from headrace.images import with_images
from headrace.job.eval_sets import PASS_REWARD, eval_sets, own_functions
from headrace.job.schema.production import EvalSection
from headrace.job.schema.section import PromptPath
from headrace.limits import (
    MAX_EVAL_FILE_BYTES,
    MAX_EVAL_PROMPTS,
    MAX_PROMPT_LINE_BYTES,
    MAX_SAMPLES_PER_GROUP,
    from_json,
    optional_name,
    require_between,
    require_finite,
    require_name,
    require_path,
    shown,
    to_json,
)
from headrace.prompts import content_of, ordered_json, parse_row, rows_of, set_content, set_label, typed_value, value_at
from headrace.trajectory import MAX_REWARD
from services.rollout.engine.api import SamplingParams
from services.rollout.production.hooks import GENERATE_FUNCTION_PATH
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import merged_params

_FIELD = "datasets.path"


@dataclass(frozen=True, slots=True)
class EvalFiles:
    """The files that a client may name: `files` themselves, and everything under the `root`; and `functions`.

    Generate functions that the operator has not named are never imported.
    """

    files: Sequence[Path]
    root: Path | None
    functions: Collection[str] = ()

    @classmethod
    def of(cls, section: EvalSection, prompt_root: Path | None) -> EvalFiles:
        """Allows what a job's evaluations name, and everything under its prompt_root."""
        sets = eval_sets(section)
        return cls([each.prompts.path for each in sets], prompt_root, own_functions(sets))

    def read(self, dataset: pb.EvalDataset) -> tuple[sample_pb2.Prompt, ...]:
        """Returns the prompts of the file, or of its slice `path@[a:b]`, checked; their ids are file:line.

        Blocks; raises InvalidArgument with file and line for a bad row.
        """
        overrides = _overrides(dataset)
        try:
            part = PromptPath.parse(require_path(dataset.path, _FIELD), _FIELD)
        except ConfigError as error:
            raise InvalidArgument(error.message, field=_FIELD) from error
        part = replace(part, path=self._allowed(str(part.path)))
        with _opened(part.path) as file:
            most = dataset.max_prompts if dataset.HasField("max_prompts") else None
            rows = tuple(_prompt(where, line, dataset, overrides) for where, line in _lines(part, file, most))
        if not rows:
            raise InvalidArgument(f"{part.absolute()} has no prompts", field=_FIELD)
        return rows

    def _allowed(self, path: str) -> Path:
        """Follows links, so that none leads out of the root."""
        try:
            real = ((self.root or Path()) / path).resolve()
            if any(real == file.resolve() for file in self.files):
                return real
            if self.root is not None and real.is_relative_to(self.root.resolve()):
                return real
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidArgument(f"path {shown(path)} cannot be read: {error}", field=_FIELD) from error
        under = f"or lie under --prompt-root {self.root}" if self.root else "as there is no --prompt-root"
        raise InvalidArgument(f"path {shown(path)} must be one of the job's eval_prompt_data, {under}", field=_FIELD)


def _opened(path: Path) -> BinaryIO:
    """Opens a regular file; it waits for no FIFO and reads no device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise InvalidArgument(
            f"there is no file {path} to be read on the rollout service's machine: {error.strerror}", field=_FIELD
        ) from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_EVAL_FILE_BYTES:
        os.close(descriptor)
        raise InvalidArgument(
            f"{path} must be a regular file of at most {MAX_EVAL_FILE_BYTES} bytes, has {facts.st_size}", field=_FIELD
        )
    return os.fdopen(descriptor, "rb")


def _lines(part: PromptPath, file: BinaryIO, max_prompts: int | None) -> Iterator[tuple[str, Any]]:
    """Yields (file:line, row) of each row used."""
    path, rows = part.path, rows_of(file, part.path, part.first_row, part.end_row)
    for used, (number, line) in enumerate(islice(rows, max_prompts), 1):
        if isinstance(line, bytes) and len(line) > MAX_PROMPT_LINE_BYTES:
            raise InvalidArgument(f"{path}:{number}: longer than {MAX_PROMPT_LINE_BYTES} bytes", field=_FIELD)
        if used > MAX_EVAL_PROMPTS:
            raise InvalidArgument(
                f"{path} has more than {MAX_EVAL_PROMPTS} prompts: pass max_prompts", field="datasets.max_prompts"
            )
        yield f"{path}:{number}", line


def _prompt(where: str, line: Any, keys: pb.EvalDataset, overrides: Mapping[str, Any]) -> sample_pb2.Prompt:
    """`overrides` are laid over the row's metadata; its scorer is that of the data set only where it names none."""
    try:
        row = parse_row(line)
        content = content_of(row, keys.input_key)
        if keys.image_key:
            content = with_images(content, row, keys.image_key, Path(where.rpartition(":")[0]).parent)
        own = value_at(row, keys.metadata_key) if keys.metadata_key else None
        rm_type = {"rm_type": keys.rm_type} if keys.rm_type else {}
        metadata = {**rm_type, **(own if isinstance(own, dict) else {}), **overrides}
        own_function = {GENERATE_FUNCTION_PATH: keys.generate_function_path} if keys.generate_function_path else {}
        prompt = sample_pb2.Prompt(
            prompt_id=where, metadata_json=to_json(metadata), hook_json=to_json(own_function) if own_function else ""
        )
        set_content(prompt, content)
        if (tools := typed_value(row, keys.tool_key, list)) is not None:
            prompt.tools_json = ordered_json(tools)
        set_label(prompt, value_at(row, keys.label_key) if keys.label_key else None)
    except (InvalidArgument, ValueError) as error:  # ValueError: protobuf's, for text that is not Unicode
        raise InvalidArgument(f"{where}: {error}", field=_FIELD) from error
    return prompt


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """A data set whose values were checked, with its prompts and how they are sampled."""

    dataset: pb.EvalDataset
    rows: tuple[sample_pb2.Prompt, ...]
    params: SamplingParams

    @property
    def n_samples(self) -> int:
        """The number of samples of each prompt."""
        return self.dataset.n_samples_per_prompt

    @property
    def total(self) -> int:
        """The number of its samples."""
        return len(self.rows) * self.n_samples

    @property
    def pass_reward(self) -> float:
        """The least reward of a sample that passes."""
        return self.dataset.pass_reward if self.dataset.HasField("pass_reward") else PASS_REWARD

    def encode(self, encoder: PromptEncoder, row: sample_pb2.Prompt) -> tuple[EncodedPrompt, SamplingParams]:
        """Returns the prompt, and the parameters of a response that fits beside it. Blocks.

        Raises InvalidArgument for a prompt that the chat template refuses, or that is too long.
        """
        prompt, asked, params = encoder.encode(row), self.dataset, self.params
        num_tokens = len(prompt.tokens)
        if asked.HasField("max_prompt_tokens"):
            _require_short(num_tokens, asked.max_prompt_tokens, "max_prompt_len")
        if asked.HasField("max_context_tokens"):
            _require_short(num_tokens, asked.max_context_tokens - 1, "max_context_len")
            params = params.at_most(asked.max_context_tokens - num_tokens)
        return prompt, params


def _require_short(num_tokens: int, limit: int, name: str) -> None:
    if num_tokens > limit:
        raise InvalidArgument(
            f"the prompt has {num_tokens} tokens, and {name} allows {limit}", reason="PROMPT_TOO_LONG"
        )


def read_plan(dataset: pb.EvalDataset, files: EvalFiles, defaults: SamplingParams) -> EvalPlan:
    """Blocks. Raises InvalidArgument that names the field, or file and line."""
    require_between(dataset.n_samples_per_prompt, 1, MAX_SAMPLES_PER_GROUP, "datasets.n_samples_per_prompt")
    for name in ("name", "input_key"):
        require_name(getattr(dataset, name), f"datasets.{name}")
    for name in ("label_key", "metadata_key", "tool_key", "rm_type", "image_key", "reward_key"):
        optional_name(getattr(dataset, name), f"datasets.{name}")
    require_finite(dataset.pass_reward, "datasets.pass_reward", least=-MAX_REWARD, most=MAX_REWARD)
    path = dataset.generate_function_path
    if path and path not in files.functions:
        raise InvalidArgument(
            f"generate function {shown(path)} is none that the job's eval_config names",
            field="datasets.generate_function_path",
        )
    return EvalPlan(dataset, files.read(dataset), merged_params(dataset.sampling, defaults))


def _overrides(dataset: pb.EvalDataset) -> dict[str, Any]:
    try:
        return from_json(dataset.metadata_overrides_json) if dataset.metadata_overrides_json else {}
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="datasets.metadata_overrides_json") from error
