"""Builds the request for an evaluation's data set, for the trainer and `headrace eval`."""

from __future__ import annotations

from typing import TypeVar

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.job.eval_sets import EvalSet
from headrace.job.schema.production import DataSection, EvalSection, RolloutSection
from headrace.wire.json_text import to_json

T = TypeVar("T")


def eval_dataset(
    of_set: EvalSet,
    evaluation: EvalSection,
    rollout: RolloutSection,
    data: DataSection,
    max_prompts: int | None = None,
) -> rollout_pb2.EvalDataset:
    """Its rows, sampled as the set says, else as the [eval] section says, else as training is."""
    n_samples = of_set.n_samples_per_eval_prompt or evaluation.n_samples_per_eval_prompt
    return rollout_pb2.EvalDataset(
        name=of_set.name,
        path=str(of_set.path),
        n_samples_per_prompt=n_samples,
        sampling=sample_pb2.SamplingParams(
            temperature=_temperature(of_set, evaluation, rollout, n_samples),
            top_p=_first(of_set.top_p, evaluation.eval_top_p),
            top_k=_first(of_set.top_k, evaluation.eval_top_k),
            max_new_tokens=_first(
                of_set.max_response_len, evaluation.eval_max_response_len, rollout.rollout_max_response_len
            ),
            min_new_tokens=_first(of_set.min_new_tokens, evaluation.eval_min_new_tokens),
            stop=_first(of_set.stop, rollout.rollout_stop),
            stop_token_ids=_first(of_set.stop_token_ids, rollout.rollout_stop_token_ids),
        ),
        max_prompts=max_prompts,
        input_key=of_set.input_key or evaluation.eval_input_key or data.input_key,
        label_key=_first(of_set.label_key, evaluation.eval_label_key, data.label_key) or "",
        metadata_key=_first(of_set.metadata_key, data.metadata_key) or "",
        tool_key=_first(of_set.tool_key, evaluation.eval_tool_key, data.tool_key) or "",
        max_prompt_tokens=_first(of_set.max_prompt_len, evaluation.eval_max_prompt_len),
        max_context_tokens=_first(
            of_set.max_context_len, evaluation.eval_max_context_len, rollout.rollout_max_context_len
        ),
        rm_type=of_set.rm_type or "",
        reward_key=_first(of_set.reward_key, evaluation.eval_reward_key) or "",
        metadata_overrides_json=_overrides(of_set),
        generate_function_path=of_set.custom_generate_function_path or "",
        image_key=data.image_key or "",
        pass_reward=_first(of_set.pass_reward, evaluation.eval_pass_reward),
    )


def _overrides(of_set: EvalSet) -> str:
    """A function of the set's own scores all its rows, whatever they name: the reward service has it by its path."""
    scorer = {} if of_set.custom_rm_path is None else {"rm_type": of_set.custom_rm_path}
    overrides = {**(of_set.metadata_overrides or {}), **scorer}
    return to_json(overrides) if overrides else ""


def _first(*values: T | None) -> T | None:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def _temperature(of_set: EvalSet, evaluation: EvalSection, rollout: RolloutSection, n_samples: int) -> float:
    """Greedy, unless the job asks for what sampling alone gives: several responses to a prompt, or a nucleus."""
    asked = _first(of_set.temperature, evaluation.eval_temperature)
    if asked is not None:
        return asked
    samples = n_samples > 1 or _first(of_set.top_p, evaluation.eval_top_p) is not None
    return rollout.rollout_temperature if samples else 0.0
