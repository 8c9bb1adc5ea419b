"""One data set of an evaluation, as it was asked for and found right: its rows, and how each is sampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.limits import (
    MAX_SAMPLES_PER_GROUP,
    from_json,
    optional_name,
    require_between,
    require_finite,
    require_name,
    require_path,
    shown,
)
from headrace.trajectory import MAX_REWARD
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluation.eval_file import EvalFiles, EvalKeys, EvalRow
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import merged_params


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """`generate` is a generate function of the job's eval_config, or None for the job's own way.

    `reward_key` is the part of dict rewards that counts, or None for the reward service's choice.
    """

    name: str
    rows: tuple[EvalRow, ...]
    n_samples: int
    params: SamplingParams
    pass_reward: float
    generate: str | None
    reward_key: str | None
    max_prompt_tokens: int | None
    max_context_tokens: int | None

    @property
    def total(self) -> int:
        """The number of its samples."""
        return len(self.rows) * self.n_samples

    def encode(self, encoder: PromptEncoder, row: EvalRow) -> EncodedPrompt:
        """Blocks. Raises InvalidArgument for a prompt that the chat template refuses, or that is too long."""
        if isinstance(row.prompt, str):
            prompt = encoder.encode_text(row.prompt)
        else:
            prompt = encoder.encode_messages(row.prompt, row.tools)
        for limit, name in ((self.max_prompt_tokens, "max_prompt_len"), (self._most_prompt_tokens, "max_context_len")):
            if limit is not None and len(prompt.tokens) > limit:
                raise InvalidArgument(
                    f"the prompt has {len(prompt.tokens)} tokens, and {name} allows {limit}", reason="PROMPT_TOO_LONG"
                )
        return prompt

    def params_for(self, prompt: EncodedPrompt) -> SamplingParams:
        """The parameters, with a response that fits beside the prompt."""
        if self.max_context_tokens is None:
            return self.params
        return self.params.at_most(self.max_context_tokens - len(prompt.tokens))

    @property
    def _most_prompt_tokens(self) -> int | None:
        return None if self.max_context_tokens is None else self.max_context_tokens - 1


def read_plan(
    dataset: pb.EvalDataset, files: EvalFiles, defaults: SamplingParams, generate_functions: Collection[str]
) -> EvalPlan:
    """Blocks. Raises InvalidArgument that names the field, or file and line."""
    n_samples = require_between(dataset.n_samples_per_prompt, 1, MAX_SAMPLES_PER_GROUP, "datasets.n_samples_per_prompt")
    keys = EvalKeys(
        require_name(dataset.input_key, "datasets.input_key"),
        optional_name(dataset.label_key, "datasets.label_key"),
        optional_name(dataset.metadata_key, "datasets.metadata_key"),
        optional_name(dataset.tool_key, "datasets.tool_key"),
        optional_name(dataset.rm_type, "datasets.rm_type"),
        _overrides(dataset),
        optional_name(dataset.image_key, "datasets.image_key"),
    )
    limit = dataset.max_prompts if dataset.HasField("max_prompts") else None
    return EvalPlan(
        name=require_name(dataset.name, "datasets.name"),
        n_samples=n_samples,
        params=merged_params(dataset.sampling, defaults),
        pass_reward=_pass_reward(dataset),
        generate=_generate(dataset, generate_functions),
        reward_key=optional_name(dataset.reward_key, "datasets.reward_key"),
        max_prompt_tokens=dataset.max_prompt_tokens if dataset.HasField("max_prompt_tokens") else None,
        max_context_tokens=dataset.max_context_tokens if dataset.HasField("max_context_tokens") else None,
        rows=tuple(files.read(require_path(dataset.path, "datasets.path"), keys, limit)),
    )


def _generate(dataset: pb.EvalDataset, known: Collection[str]) -> str | None:
    """Refuses functions that the operator has not named: they would be imported."""
    path = dataset.generate_function_path
    if path and path not in known:
        raise InvalidArgument(
            f"generate function {shown(path)} is none that the job's eval_config names",
            field="datasets.generate_function_path",
        )
    return path or None


def _overrides(dataset: pb.EvalDataset) -> dict[str, Any]:
    try:
        return from_json(dataset.metadata_overrides_json) if dataset.metadata_overrides_json else {}
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="datasets.metadata_overrides_json") from error


def _pass_reward(dataset: pb.EvalDataset) -> float:
    if not dataset.HasField("pass_reward"):
        return 1.0
    return require_finite(dataset.pass_reward, "datasets.pass_reward", least=-MAX_REWARD, most=MAX_REWARD)
