from __future__ import annotations

from pathlib import Path

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from services.rollout.engine.api import SamplingParams
from services.rollout.evaluate import Evaluator
from services.rollout.generator import Generator
from services.rollout.judge import Judge
from services.rollout.prompts import PromptEncoder
from services.rollout.sampling import SampleMaker
from tests.support.fake_fleet import FakeFleet
from tests.support.scripted_reward import refuse, score, scripted_reward
from tests.support.tiny_model import make_tiny_tokenizer


async def test_progress_then_means_over_the_judged_samples_only(fakes: FakeFleet, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", r"bad\.jsonl:2: not JSON"), ("[1]", r"bad\.jsonl:2: not a JSON object"), ('{"p": 1}', r"bad\.jsonl:2: 'q'")],
)
async def test_a_bad_line_is_named_by_file_and_number(
    fakes: FakeFleet, tmp_path: Path, line: str, message: str
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(f'{{"q": "one"}}\n{line}\n')
    evaluator = evaluation(fakes, tmp_path, "127.0.0.1:1")
    with pytest.raises(InvalidArgument, match=message):
        async for _ in evaluator.run([pb.EvalDataset(name="d", path=str(data), n_samples_per_prompt=1, input_key="q")]):
            pass


def evaluation(fakes: FakeFleet, folder: Path, reward_address: str) -> Evaluator:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    encoder = PromptEncoder(folder / "tokenizer", apply_chat_template=False)
    maker = SampleMaker(Generator(fakes.fleet.engines[0].client, lambda: 0), encoder, seconds=60)
    judge = Judge(reward_address, item_seconds=1)
    return Evaluator(encoder, maker, judge, SamplingParams(max_new_tokens=5), seed=1)
