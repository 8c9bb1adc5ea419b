"""The functions that the documents print run as printed, but for their imports, and what they make can be trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks import HookArgs, RewardForm, hook_args, run_reward
from headrace.hooks import Sample as HookSample
from headrace.job.schema.job import Job
from headrace.trajectory import Sample, Status
from services.rollout.engine.api import SamplingParams
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.hooks import CustomGenerateSampler, custom_args
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import SampleRequest
from tests.long_forms import ALL
from tests.support.documents import snippet
from tests.support.fakes.fake_fleet import fake_fleet
from tests.support.fakes.scripted_engine import ScriptedEngine
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_tokenizer

ROOT = Path(__file__).parents[4]
IMPORTS = """
from headrace.hooks import Sample
from headrace.hooks.kit import build_loss_mask, extract_tool_call, generate_single
from task import compute_reward, execute_tool
"""
TASK = """
{kind}def execute_tool(call):
    return str(call.arguments["a"] + call.arguments["b"])

def compute_reward(sample):
    return float(sample.label in sample.response)
"""
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
ANSWER = "The answer is 7."
FORMS = {"Custom Generate Function": "async ", "Step 1: Define Custom Generate Function": ""}
ASYNC, PLAIN = FORMS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_chat_tokenizer("qwen2.5").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("heading", "per_sample"),
    [(ASYNC, False), (PLAIN, True), *([(ASYNC, True), (PLAIN, False)] if ALL else [])],
)
async def test_a_printed_generate_function_trains_the_tokens_that_were_sampled(
    model: Path, heading: str, per_sample: bool
) -> None:
    samples, engine = await generated(model, heading, [CALL, ANSWER], per_sample=per_sample)
    tokenizer = make_chat_tokenizer("qwen2.5")
    said = [
        *QUESTION,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": ANSWER},
    ]
    for sample in samples:
        assert (sample.failure, sample.status, sample.reward) == (None, Status.COMPLETED, 1.0)
        assert sample.response == ANSWER
        assert tokenizer.decode(sample.tokens) + "\n" == tokenizer.apply_chat_template(said, tokenize=False)
        trained = sample.loss_mask.astype(bool)
        response = sample.tokens[sample.prompt_length :]
        assert response[trained].tolist() == engine.turns[0] + engine.turns[1]
        assert sample.rollout_log_probs[trained].tolist() == pytest.approx(
            [-(token % 7 + 1) / 10 for token in response[trained].tolist()]
        )
        assert not sample.rollout_log_probs[~trained].any()
        assert [(r.policy_version, r.start, r.end) for r in sample.policy_ranges] == [(0, 0, len(response))]


@pytest.mark.parametrize("heading", FORMS if ALL else [ASYNC])
async def test_a_conversation_that_reaches_max_turns_is_truncated_and_has_its_tokens(model: Path, heading: str) -> None:
    samples, engine = await generated(model, heading, [CALL, CALL], max_turns=2)
    for sample in samples:
        assert (sample.failure, sample.reward) == (None, 0.0)
        trained = sample.tokens[sample.prompt_length :][sample.loss_mask.astype(bool)]
        assert trained.tolist() == engine.turns[0] + engine.turns[1]


async def test_the_tool_task_of_docs_hooks_runs_as_printed(model: Path) -> None:
    (code,) = re.findall(r"```python\n(# calculator\.py\n.*?)```", (ROOT / "docs/hooks.md").read_text(), re.S)
    samples, engine = await generated(model, None, [CALL, ANSWER], max_turns=4, code=code)
    for sample in samples:
        assert (sample.failure, sample.status, sample.reward) == (None, Status.COMPLETED, None)
        trained = sample.tokens[sample.prompt_length :][sample.loss_mask.astype(bool)]
        assert trained.tolist() == engine.turns[0] + engine.turns[1]
        assert sample.response == ANSWER


async def test_the_generate_function_of_docs_hooks_makes_samples(tmp_path: Path) -> None:
    turns = 2
    code, *_ = re.findall(r"```python\n(# agent\.py\n.*?)```", (ROOT / "docs/hooks.md").read_text(), re.S)
    (tmp_path / "agent.py").write_text(code)
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    sections: dict[str, Any] = {"model": {"hf_checkpoint": tmp_path / "model"}, "rollout": {"max_turns": turns}}
    prompt = EncodedPrompt("2 + 2 =", tuple(tokenizer.encode("2 + 2 =")))
    async with fake_fleet(1) as fakes:
        await fakes.name_weights(0, 3)
        fakes.fleet.weights.switch_to(3)
        args = custom_args(hook_args(Job.model_validate(sections)), fakes.fleet.engines[0].url)
        sampler = CustomGenerateSampler(
            f"{tmp_path / 'agent.py'}:generate", args, fakes.fleet.weights, seconds=120, calls_at_once=1
        )
        try:
            await sampler.start()
            request = SampleRequest("g/1/0", "g", 0, prompt, "4", {}, SamplingParams(max_new_tokens=4))
            (sample,) = await sampler.sample_all([request], evaluation=False)
        finally:
            await sampler.close()
    assert (sample.failure, sample.status) == (None, Status.TRUNCATED)
    assert sample.tokens[: sample.prompt_length].tolist() == list(prompt.tokens)
    assert sample.loss_mask.sum() == 4 * turns
    assert (sample.loss_mask == 0).any()
    assert [r.policy_version for r in sample.policy_ranges] == [3]


async def test_the_printed_rewards_of_one_and_of_many_samples(tmp_path: Path) -> None:
    code = snippet("Custom Reward Function", "from headrace.hooks import Sample\n")
    (tmp_path / "custom_rm.py").write_text(code)
    samples = [HookSample(response=" 7 ", label="7"), HookSample(response="8", metadata={"answer": "7"})]
    for name, form in (("reward_func", RewardForm.SAMPLE), ("batched_custom_rm", RewardForm.GROUP)):
        assert await run_reward(f"{tmp_path / 'custom_rm.py'}:{name}", form, HookArgs({}), samples) == [1.0, 0.0]


async def test_the_printed_reward_model(tmp_path: Path) -> None:
    loads = (
        "import numpy\ndef load_model(folder):\n    return lambda texts: numpy.array([float(len(t)) for t in texts])\n"
    )
    code = snippet("Custom Reward Model", loads)
    code += "    def tokenize(self, prompts, responses):\n        return [p + r for p, r in zip(prompts, responses)]\n"
    (tmp_path / "custom_rm.py").write_text(code)
    samples = [HookSample(prompt="a", response="bc"), HookSample(prompt="d", response="")]
    path, args = f"{tmp_path / 'custom_rm.py'}:CustomRewardModel", HookArgs({"reward_model_path": "judge"})
    assert await run_reward(path, RewardForm.BATCH, args, samples) == [3.0, 1.0]


async def generated(
    model: Path, heading: str | None, turns: list[str], *, max_turns: int = 5, per_sample: bool = False, code: str = ""
) -> tuple[list[Sample], ScriptedEngine]:
    """Two samples of one group, whose row has messages and no --apply-chat-template."""
    folder = model.parent
    if heading:
        code = snippet(heading, IMPORTS)
        (folder / "task.py").write_text(TASK.format(kind=FORMS[heading]))
    (folder / "custom_generate.py").write_text(code)
    engine = ScriptedEngine(make_chat_tokenizer("qwen2.5"), turns)
    await engine.start(seconds=60)
    sections: dict[str, Any] = {"model": {"hf_checkpoint": model}, "rollout": {"max_turns": max_turns}}
    args = custom_args(hook_args(Job.model_validate(sections)), engine.url)
    path = f"{folder / 'custom_generate.py'}:custom_generate"
    sampler = CustomGenerateSampler(path, args, ServedWeights(), seconds=120, calls_at_once=2, per_sample=per_sample)
    prompt = PromptEncoder(model, apply_chat_template=False).encode_messages(QUESTION, None)
    params = SamplingParams(max_new_tokens=200, stop_token_ids=(engine.end_of_turn,))
    try:
        await sampler.start()
        requests = [SampleRequest(f"g/1/{i}", "g", i, prompt, "7", {}, params) for i in range(2)]
        return await sampler.sample_all(requests, evaluation=False), engine
    finally:
        await sampler.close()
        await engine.stop()
