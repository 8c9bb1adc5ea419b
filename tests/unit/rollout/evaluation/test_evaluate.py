from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from headrace.job.schema.production import EvalSection
from headrace.limits import MAX_EVALUATIONS, MAX_SAMPLES_PER_GROUP
from headrace.trajectory import Failure, Sample, Status
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.replies import BadAnswer
from services.rollout.evaluation.dataset import EvalFiles
from services.rollout.evaluation.runner import EvalRunner
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, SampleRequest, failed_sample
from services.rollout.scoring import SampleScorer
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.fakes.scripted_reward import refuse, score, scripted_reward
from tests.support.models.tiny_model import make_tiny_tokenizer


async def test_progress_then_means_over_the_scored_samples_only(fakes: FakeFleet, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "one", "a": 1}\n\n{"q": [{"role": "user", "content": "two"}], "a": 2}\n{"q": "x", "a": 3}\n')
    async with scripted_reward(lambda i: score(float(i.label))(i) if i.label != "2" else refuse("NO")(i)) as reward:
        evaluator = evaluation(fakes, tmp_path, reward.address)
        dataset = pb.EvalDataset(
            name="d", path=str(data), n_samples_per_prompt=2, input_key="q", label_key="a", max_prompts=2
        )
        progress = [p async for p in evaluator.run([dataset])]
    assert [(p.done, p.total) for p in progress] == [(1, 4), (2, 4), (3, 4), (4, 4), (4, 4)]
    (result,) = progress[-1].results
    assert (result.name, result.mean_reward, result.num_samples, result.num_failed) == ("d", 1.0, 2, 2)
    assert (result.mean_response_tokens, result.truncated_ratio) == (5.0, 1.0)


def evaluation(fakes: FakeFleet, folder: Path, reward_address: str) -> EvalRunner:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    encoder = PromptEncoder(folder / "tokenizer", apply_chat_template=False)
    sampler = EngineSampler(Generator(fakes.fleet.engines[0].client, fakes.fleet.weights), encoder, seconds=60)
    scorer = SampleScorer(reward_address, item_seconds=1)
    params, slots = SamplingParams(max_new_tokens=5), EngineSlots(Shares({Kind.EVALUATION: 64}), max_waiting=0)
    return EvalRunner(encoder, sampler, scorer, params, seed=1, files=EvalFiles([], folder), slots=slots)


class Counting:
    """A maker that fails for some, and says how many were made at once."""

    in_flight = 0

    def __init__(self, failing: Collection[int] = ()) -> None:
        self.failing = failing
        self.asked = 0
        self.most = 0

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        self.asked += 1
        number = self.asked
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if number in self.failing:
            raise BadAnswer("log_prob", "NaN") if number % 2 else KeyError("a bug")
        (request,) = requests
        return [replace(failed_sample(request, Failure("NO", "")), status=Status.COMPLETED, failure=None, reward=1.0)]


class Agreeing:
    """Judges nothing again."""

    async def score(self, samples: Sequence[Sample], *, evaluation: bool) -> list[Sample]:
        assert evaluation
        return list(samples)


def evaluator_with(sampler: Counting, folder: Path, *files: Path, root: Path | None = None) -> EvalRunner:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    encoder = PromptEncoder(folder / "tokenizer", apply_chat_template=False)
    params, slots = SamplingParams(max_new_tokens=5), EngineSlots(Shares({Kind.EVALUATION: 64}), max_waiting=0)
    scorer = cast(SampleScorer, Agreeing())
    return EvalRunner(encoder, sampler, scorer, params, seed=1, files=EvalFiles(files, root), slots=slots)


def fifty(folder: Path) -> Path:
    (data := folder / "fifty.jsonl").write_text("".join(f'{{"q": "{number}"}}\n' for number in range(50)))
    return data


@pytest.mark.parametrize(("part", "numbers"), [("@[:3]", range(3)), ("@[2:5]", range(2, 5)), ("@[48:]", (48, 49))])
def test_a_slice_of_a_file_is_read(tmp_path: Path, part: str, numbers: Sequence[int]) -> None:
    named = [["d", f"{(data := fifty(tmp_path))}@[1:2]"]]
    of_job = EvalFiles.of(EvalSection.model_validate({"eval_prompt_data": named}), None)
    for files in (EvalFiles([data], None), of_job, EvalFiles([], tmp_path)):
        rows = [(row.prompt_id, row.text) for row in files.read(dataset(f"{data}{part}"))]
        assert rows == [(f"{data}:{each + 1}", str(each)) for each in numbers]


@pytest.mark.parametrize(("part", "message"), [("@[3:3]", "holds no lines"), ("@[50:]", r"@\[50:\] has no prompts")])
def test_a_slice_without_rows_is_refused(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        EvalFiles([], tmp_path).read(dataset(f"{fifty(tmp_path)}{part}"))


def dataset(path: Path | str, n_samples: int = 1) -> pb.EvalDataset:
    return pb.EvalDataset(name="d", path=str(path), n_samples_per_prompt=n_samples, input_key="q")


async def test_one_bad_answer_of_fifty_is_counted_and_the_evaluation_goes_on(tmp_path: Path) -> None:
    data = fifty(tmp_path)
    evaluator = evaluator_with(Counting(failing=(7, 20)), tmp_path, data)
    progress = [p async for p in evaluator.run([dataset(data)])]
    (result,) = progress[-1].results
    assert (result.num_samples, result.num_failed, result.mean_reward) == (48, 2, 1.0)


async def test_an_evaluation_of_which_most_fails_says_why(tmp_path: Path) -> None:
    data, sampler = fifty(tmp_path), Counting(failing=range(1, 100))
    with pytest.raises(FailedPrecondition, match=r"26 of 50 samples failed, the first by") as caught:
        async for _ in evaluator_with(sampler, tmp_path, data).run([dataset(data)]):
            pass
    assert caught.value.reason == "EVALUATION_FAILED"


async def test_requests_are_made_as_places_become_free_and_never_more_than_an_evaluation_may_have(
    tmp_path: Path,
) -> None:
    data, sampler = fifty(tmp_path), Counting()
    evaluator = evaluator_with(sampler, tmp_path, data)
    async with contextlib.aclosing(evaluator.run([dataset(data, MAX_SAMPLES_PER_GROUP)])) as running:
        await anext(running)
        assert sampler.asked <= 2 * 64, "of 51,200"
    with pytest.raises(InvalidArgument, match=f"n_samples_per_prompt is {MAX_SAMPLES_PER_GROUP + 1}"):
        await anext(evaluator.run([dataset(data, MAX_SAMPLES_PER_GROUP + 1)]))
    with pytest.raises(InvalidArgument, match="samples, an evaluation may have"):
        await anext(evaluator.run([dataset(data, MAX_SAMPLES_PER_GROUP)] * 21))
    async for _ in evaluator.run([dataset(data, 8)]):
        pass
    assert 1 < sampler.most <= 64


async def test_so_many_evaluations_run_at_once_and_one_that_ends_makes_room(tmp_path: Path) -> None:
    data = fifty(tmp_path)
    evaluator = evaluator_with(Counting(), tmp_path, data)
    running = [evaluator.run([dataset(data)]) for _ in range(MAX_EVALUATIONS)]
    for one in running:
        await anext(one)
    with pytest.raises(ResourceExhausted, match="8 evaluations run"):
        await anext(evaluator.run([dataset(data)]))
    await running[0].aclose()
    assert (await anext(evaluator.run([dataset(data)]))).total == 50
    for one in running:
        await one.aclose()


async def test_only_the_jobs_files_and_regular_files_below_the_root_are_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret.jsonl"
    root.mkdir()
    good = fifty(root)
    outside.write_text('{"q": "secret"}\n')
    (root / "link.jsonl").symlink_to(outside)
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    evaluator = evaluator_with(Counting(), tmp_path, outside, root=root)
    for path in (good, outside, good.name, root / "folder" / ".." / good.name):
        assert (await anext(evaluator.run([dataset(path)]))).total >= 1
    strict = evaluator_with(Counting(), tmp_path, root=root)
    bad = (outside, root / "link.jsonl", root / "fifo", root / "folder", "../secret.jsonl", "/dev/zero", "/dev/stdin")
    for path in (*bad, "/proc/self/environ", root / "none", "x" * 4096, "x" * 5000, "\0", ""):
        async with asyncio.timeout(60):  # a FIFO is not waited for
            with pytest.raises(InvalidArgument):
                await anext(strict.run([dataset(path)]))
    with pytest.raises(InvalidArgument, match="as there is no --prompt-root"):
        await anext(evaluator_with(Counting(), tmp_path, good).run([dataset(outside)]))


@pytest.mark.parametrize(
    "line",
    [
        "{", "[1]", '{"p": 1}', '{"q": []}', '{"q": [1]}', '{"q": [{"content": "x"}]}', '{"q": null}', '{"q": 7}',
        "[" * 200_000, "9" * 5_000, "\x00", '{"q": "\\ud800"}', '{"q": "x", "l": "\\ud800"}',
        '{"q": "x", "m": {"a": NaN}}', '{"q": "x", "t": "add"}', '{"q": "x", "t": {}}',
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_a_prompt_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(f'{{"q": "one"}}\n{line}\n')
    keys = pb.EvalDataset(path=str(data), input_key="q", label_key="l", metadata_key="m", tool_key="t")
    with pytest.raises(InvalidArgument, match=r"bad\.jsonl:2"):
        EvalFiles([data], None).read(keys)


async def test_the_loop_goes_on_while_megabytes_are_tokenized(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    encoding = asyncio.create_task(encoder.off_loop(encoder.encode_plain, "the quick brown fox " * 100_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert turns > 10
    assert len((await encoding).tokens) > 1_000_000
    with pytest.raises(InvalidArgument, match="prompt has 9000000 bytes"):
        encoder.encode_plain("x" * 9_000_000)


class OneOfTwo(Counting):
    """Every second sample of a prompt gets a reward of 0; each fans out into two."""

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        (sample,) = await super().sample_all(requests, evaluation=evaluation)
        reward = float(requests[0].index % 2)
        return [replace(sample, sample_id=f"{sample.sample_id}/{part}", reward=reward) for part in range(2)]


async def test_a_result_has_its_interval_and_pass_at_k_and_samples_that_fanned_out_count_as_one(tmp_path: Path) -> None:
    data = fifty(tmp_path)
    (result,) = [p async for p in evaluator_with(OneOfTwo(), tmp_path, data).run([dataset(data, 4)])][-1].results
    assert (result.num_prompts, result.num_samples, result.mean_reward) == (50, 400, 0.5)
    assert (result.low, result.high) == (0.5, 0.5), "all prompts agree"
    assert {each.k: each.estimate for each in result.pass_at_k} == pytest.approx({1: 0.5, 2: 5 / 6, 4: 1.0})


@pytest.mark.parametrize("pass_reward", [float("nan"), float("inf"), 1e7])
async def test_a_pass_reward_that_no_sample_may_have_is_refused(tmp_path: Path, pass_reward: float) -> None:
    data = fifty(tmp_path)
    asked = dataset(data)
    asked.pass_reward = pass_reward
    with pytest.raises(InvalidArgument, match="pass_reward"):
        await anext(evaluator_with(Counting(), tmp_path, data).run([asked]))


class Groups:
    """Notes which samples came in one call; one of them has failed before."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def score(self, samples: Sequence[Sample], *, evaluation: bool) -> list[Sample]:
        assert evaluation
        self.calls.append([sample.group_id for sample in samples])
        return list(samples)


@pytest.mark.parametrize(("scores_groups", "sizes"), [(True, {4}), (False, {1})])
async def test_a_reward_of_groups_sees_all_samples_of_a_prompt_in_one_call(
    tmp_path: Path, scores_groups: bool, sizes: set[int]
) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    data, sampler, scorer = fifty(tmp_path), Counting(failing=(7,)), Groups()
    evaluator = EvalRunner(
        PromptEncoder(tmp_path / "tokenizer", apply_chat_template=False),
        sampler,
        cast(SampleScorer, scorer),
        SamplingParams(max_new_tokens=5),
        seed=1,
        files=EvalFiles([data], None),
        slots=EngineSlots(Shares({Kind.EVALUATION: 64}), max_waiting=0),
        scores_groups=scores_groups,
    )
    progress = [p async for p in evaluator.run([dataset(data, 4)])]
    assert {len(call) for call in scorer.calls} == sizes
    assert all(len(set(call)) == 1 for call in scorer.calls)
    (result,) = progress[-1].results
    assert (progress[-1].done, result.num_samples, result.num_failed) == (200, 199, 1)
