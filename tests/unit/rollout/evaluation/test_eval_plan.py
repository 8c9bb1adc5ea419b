"""What a data set's own settings do to its samples: tools, scorer, lengths, generate function."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from headrace.api.reward.v1 import reward_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs
from headrace.trajectory import Sample, Status
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import EvalRunner
from services.rollout.production.hooks import CustomGenerateSampler, OwnFunctions
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import SampleRequest
from services.rollout.scoring import SampleScorer
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.unit.rollout.evaluation.test_evaluate import Agreeing, Counting, dataset, evaluation, evaluator_with, fifty

ROWS = """
{"q": [{"role": "user", "content": "two"}], "tools": [{"name": "add"}]}
{"q": [{"role": "user", "content": "two"}], "m": {"rm_type": "exact_match"}}
"""
GENERATE = """
async def f(args, sample, sampling_params, evaluation=False):
    sample.tokens = [1, 2, 3, 4]
    sample.response, sample.response_length = "hi", 2
    sample.rollout_log_probs, sample.weight_versions = [-0.5, -0.25], ["0"]
    sample.status, sample.reward = sample.Status.COMPLETED, float(evaluation)
    sample.metadata["min_new_tokens"] = sampling_params.get("min_new_tokens")
    return sample
"""


class Keeping(Counting):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[SampleRequest] = []

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        self.requests += requests
        return await super().sample_all(requests, evaluation=evaluation)


async def test_a_data_sets_tools_scorer_and_lengths_reach_its_samples(tmp_path: Path) -> None:
    data, sampler = tmp_path / "rows.jsonl", Keeping()
    data.write_text(ROWS)
    asked = dataset(data)
    asked.metadata_key, asked.tool_key, asked.rm_type, asked.max_context_tokens = "m", "tools", "math", 30
    asked.sampling.max_new_tokens, asked.sampling.min_new_tokens = 50, 40
    async for _ in evaluator_with(sampler, tmp_path, data).run([asked]):
        pass
    with_tools, plain = sorted(sampler.requests, key=lambda request: request.group_id)
    assert (list(with_tools.prompt.tools), list(plain.prompt.tools)) == ([{"name": "add"}], [])
    assert (with_tools.metadata["rm_type"], plain.metadata["rm_type"]) == ("math", "exact_match")
    room = 30 - len(plain.prompt.tokens)
    assert (plain.params.max_new_tokens, plain.params.min_new_tokens) == (room, room)


async def test_overrides_are_laid_over_each_rows_metadata(tmp_path: Path) -> None:
    data, sampler = tmp_path / "rows.jsonl", Keeping()
    data.write_text(ROWS)
    asked = dataset(data)
    asked.metadata_key, asked.metadata_overrides_json = "m", '{"rm_type": "f1", "level": 5}'
    async for _ in evaluator_with(sampler, tmp_path, data).run([asked]):
        pass
    assert {(r.metadata["rm_type"], r.metadata["level"]) for r in sampler.requests} == {("f1", 5)}
    asked.metadata_overrides_json = "[1]"
    with pytest.raises(InvalidArgument, match="object"):
        async for _ in evaluator_with(sampler, tmp_path, data).run([asked]):
            pass


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "max_context_tokens"])
async def test_samples_of_prompts_that_are_too_long_fail_and_are_counted(tmp_path: Path, limit: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"q": "one"}\n{"q": "two"}\n{"q": "' + "long " * 50 + '"}\n')
    asked = dataset(data)
    setattr(asked, limit, 20)
    progress = [p async for p in evaluator_with(Counting(), tmp_path, data).run([asked])]
    (result,) = progress[-1].results
    assert (result.num_samples, result.num_failed) == (2, 1)
    (failed,) = (s.failure for p in progress for s in p.samples if s.status is Status.FAILED)
    assert failed is not None
    assert failed.reason == "PROMPT_TOO_LONG"


async def test_a_data_sets_generate_function_is_called_with_evaluation_true(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "agent.py").write_text(GENERATE)
    data, path, production = fifty(tmp_path), f"{tmp_path}/agent.py:f", Counting()
    hook = CustomGenerateSampler(path, HookArgs({}), ServedWeights(), seconds=60, calls_at_once=8)
    evaluator = EvalRunner(
        PromptEncoder(tmp_path / "tokenizer", apply_chat_template=False),
        OwnFunctions(production, lambda _: hook, [path]),
        cast(SampleScorer, Agreeing()),
        SamplingParams(max_new_tokens=5),
        seed=1,
        files=EvalFiles([data], None, [path]),
        slots=EngineSlots(Shares({Kind.EVALUATION: 8}), max_waiting=0),
    )
    asked = dataset(data)
    asked.generate_function_path, asked.sampling.min_new_tokens, asked.max_prompts = path, 3, 4
    try:
        await hook.start()
        progress = [p async for p in evaluator.run([asked])]
    finally:
        await hook.close()
    (result,) = progress[-1].results
    assert (result.num_samples, result.mean_reward, production.asked) == (4, 1.0, 0)
    assert {s.metadata["min_new_tokens"] for p in progress for s in p.samples} == {3}


async def test_a_generate_function_that_the_job_does_not_name_is_never_imported(tmp_path: Path) -> None:
    data = fifty(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit")
    asked = dataset(data)
    asked.generate_function_path = f"{tmp_path}/evil.py:f"
    with pytest.raises(InvalidArgument, match="none that the job's eval_config names"):
        await anext(evaluator_with(Counting(), tmp_path, data).run([asked]))


async def test_a_prompt_without_a_data_source_names_no_function_but_the_jobs() -> None:
    def never(path: str) -> CustomGenerateSampler:
        raise AssertionError(path)

    sampler = Counting()
    fields = {"generate_function_path": "evil.py:f"}
    request = SampleRequest("s", "g", 0, EncodedPrompt("p", (1,)), None, {}, SamplingParams(4), hook_fields=fields)
    await OwnFunctions(sampler, never, ["agent.py:f"]).sample_all([request], evaluation=False)
    assert sampler.asked == 1


async def test_the_part_of_a_dict_reward_that_a_set_names_is_reported(fakes: FakeFleet, tmp_path: Path) -> None:
    def parts(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        found = score(0.5)(item)
        if item.label != "3":
            found.score.parts.update({"right": float(item.label), "short": 0.25})
        return found

    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "one", "a": 1}\n{"q": "two", "a": 2}\n{"q": "three", "a": 3}\n')
    asked = pb.EvalDataset(name="d", path=str(data), n_samples_per_prompt=1, input_key="q", label_key="a")
    async with scripted_reward(parts) as reward:
        evaluator = evaluation(fakes, tmp_path, reward.address)
        plain = [p async for p in evaluator.run([asked])][-1].results[0]
        asked.reward_key = "right"
        progress = [p async for p in evaluator.run([asked])]
    (result,) = progress[-1].results
    assert (plain.mean_reward, plain.num_samples) == (0.5, 3)
    assert (result.mean_reward, result.num_samples, result.num_failed) == (1.5, 2, 1)
    (failed,) = (s.failure for p in progress for s in p.samples if s.status is Status.FAILED)
    assert failed is not None
    assert (failed.reason, failed.message) == (
        "REWARD_WITHOUT_KEY",
        "the reward has no part right; its parts are none: it is one number",
    )
