"""Users' functions that evaluate: their rewards become the numbers of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import ConfigError, FailedPrecondition
from headrace.hooks import HookArgs, hook_args
from headrace.job.schema.job import Job
from headrace.trajectory import Sample, Status
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.build import eval_function
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import EvalRunner, Progress
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import SampleRequest
from services.rollout.scoring import SampleScorer
from tests.support.models.tiny_model import make_tiny_tokenizer

EVALUATES = """
import json
from headrace.hooks import Sample

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    (of_set,) = args.eval_datasets
    samples = []
    for line in open(of_set.path):
        for index in range(of_set.n_samples_per_eval_prompt):
            sample = Sample(prompt=json.loads(line)[of_set.input_key], index=len(samples), response="hi")
            sample.tokens, sample.response_length, sample.status = [1, 2, 3], 2, Sample.Status.COMPLETED
            samples.append(sample)
    RETURN
"""
REWARDS = "[float(index % 2) for index in range(len(samples))]"
WHOLE = (
    f'return {{"d": {{"rewards": {REWARDS}, "truncated": [i == 0 for i in range(len(samples))], "samples": samples}}}}'
)


class NeverAsked:
    in_flight = 0

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        raise AssertionError("the function makes the samples")


async def evaluated(folder: Path, body: str, *, evaluates: bool = True, **args: object) -> list[Progress]:
    (folder / "hook.py").write_text(EVALUATES.replace("RETURN", body) if evaluates else body)
    (folder / "data.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    path = f"{folder / 'hook.py'}:generate_rollout"
    job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "eval": {"eval_function_path": path}})
    function = eval_function(job, HookArgs({**hook_args(job), **args}), ServedWeights())
    assert function is not None
    sampler = NeverAsked()
    evaluator = EvalRunner(
        PromptEncoder(folder / "tokenizer", apply_chat_template=False),
        sampler,
        SampleScorer("127.0.0.1:1", item_seconds=1),
        SamplingParams(max_new_tokens=5),
        seed=1,
        files=EvalFiles([], folder),
        slots=EngineSlots(Shares({Kind.EVALUATION: 1}), max_waiting=0),
        function=function,
    )
    dataset = pb.EvalDataset(name="d", path=str(folder / "data.jsonl"), n_samples_per_prompt=2, input_key="q")
    try:
        await function.start()
        return [progress async for progress in evaluator.run([dataset])]
    finally:
        await function.close()


async def test_eval_function_path_makes_the_numbers_of_an_evaluation(tmp_path: Path) -> None:
    *some, last = await evaluated(tmp_path, WHOLE)
    (result,) = last.results
    assert (result.name, result.mean_reward, result.num_prompts, result.num_samples) == ("d", 0.5, 2, 4)
    assert (result.truncated_ratio, result.mean_response_tokens, result.num_failed) == (0.25, 2.0, 0)
    assert {each.k: each.estimate for each in result.pass_at_k} == {1: 0.5, 2: 1.0}
    samples = [sample for progress in some for sample in progress.samples]
    assert [(s.prompt, s.response, s.reward) for s in samples[:2]] == [("one", "hi", 0.0), ("one", "hi", 1.0)]
    assert samples[0].status is Status.TRUNCATED
    assert Sample.unpack(samples[0].pack()).sample_id == samples[0].sample_id


async def test_rewards_alone_and_rewards_of_parts_will_do(tmp_path: Path) -> None:
    *_, last = await evaluated(
        tmp_path, 'return {"d": {"rewards": [{"right": 1.0}, {"right": 0.5}]}}', reward_key="right"
    )
    assert (last.results[0].mean_reward, last.results[0].num_prompts) == (0.75, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('lost')", r"KeyError: 'lost'.*hook\.py:\d+"),
        ("return 7", "returned int from an evaluation"),
        ("return {}", "returned nothing of d, only of none"),
        ('return {"d": {"rewards": [1.0], "truncated": [True, False]}}', "1 rewards, 2 truncated and 1 samples of d"),
        ('return {"d": {"rewards": [float("nan")]}}', "a finite number"),
        ('return {"d": {"rewards": [{"a": 1}]}}', "choose one with --eval-reward-key"),
        ('return {"d": {"rewards": [None]}}', "1 of 1 samples failed"),
        ("data_source.get_samples(1)", "an evaluation has no data source"),
    ],
)
async def test_what_goes_wrong_fails_the_evaluation_with_the_reason(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(FailedPrecondition, match=message):
        await evaluated(tmp_path, body)


async def test_an_eval_function_has_to_take_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no argument `evaluation`"):
        await evaluated(tmp_path, "def generate_rollout(args, rollout_id, data_source): pass", evaluates=False)
