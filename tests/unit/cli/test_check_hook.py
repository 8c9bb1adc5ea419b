"""`headrace check hook` on code as its users' documents write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.main import main

REWARDS = """
async def reward_func(args, sample, **kwargs) -> float:
    return 1.0 if sample.response.strip() == sample.label.strip() else 0.0

async def batched_custom_rm(args, samples) -> list[float]:
    return [await reward_func(args, sample) for sample in samples]

class CustomRewardModel:
    def __init__(self, model_path):
        self.path = model_path

    def compute_reward(self, prompts, responses):
        return [float(len(self.path)) for _ in prompts]

class Needy(CustomRewardModel):
    def __init__(self, model_path):
        self.path = open(model_path + "/weights").read()

    def compute_reward(self, prompts, responses):
        return [1.0 for _ in prompts]

def raises(args, sample):
    raise KeyError("answer")

def post_process(args, samples):
    return [s.reward for s in samples], [0.5 for _ in samples]
"""
GENERATES = """
import json
import urllib.request

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        for turn in range(args.max_turns):
            sample.response = "an answer"
        sample.reward = 1.0
    return samples

async def generate(args, sample, sampling_params, evaluation=False):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    asked = json.dumps({"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True})
    answer = json.loads(urllib.request.urlopen(urllib.request.Request(url, data=asked.encode())).read())
    sample.tokens = [1, 2, 3, *answer["output_ids"]]
    sample.response, sample.response_length = answer["text"], len(answer["output_ids"])
    sample.rollout_log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    sample.update_from_meta_info(args, answer["meta_info"])
    return sample
"""
AGENTS = """
from openai import AsyncOpenAI

async def run(args, task, base_url):
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.prompt}])
    return 1.0 if task.label == made.choices[0].message.content else None

async def judged(args, task, base_url):
    pass
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    (tmp_path / "rm.py").write_text(REWARDS)
    (tmp_path / "gen.py").write_text(GENERATES)
    (tmp_path / "agent.py").write_text(AGENTS)
    return tmp_path


@pytest.mark.parametrize(
    ("hook", "flags", "code", "parts"),
    [
        ("rm.py:reward_func", (), 0, ["is a reward function", "scores 4 sample responses: [1.0, 0.0, 0.0, 0.0]"]),
        ("rm.py:batched_custom_rm", (), 0, ["is a group_reward function", "[1.0, 0.0, 0.0, 0.0]"]),
        ("rm.py:CustomRewardModel", ("--reward-model-path", "/folder"), 0, ["[7.0, 7.0, 7.0, 7.0]"]),
        ("rm.py:Needy", (), 1, ["weights", "name its own with --reward-model-path FOLDER or --job JOB.toml"]),
        ("rm.py:post_process", ("--kind", "reward_post_process"), 0, ["makes [0.5, 0.5, 0.5, 0.5] of the rewards"]),
        ("gen.py:generate", (), 0, ["is a generate function", "2 samples of 2 prompts: 4 response tokens, 4 of them"]),
        ("agent.py:run", (), 0, ["is an agent", "plays a prompt: reward 1.0"]),
        ("gen.py:custom_generate", (), 1, ["is a generate function", "cannot be trained: status is still PENDING"]),
    ],
)
def test_a_hook_is_tried_as_the_documents_write_it(
    hooks: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    flags: tuple[str, ...],
    code: int,
    parts: list[str],
) -> None:
    monkeypatch.chdir(hooks)
    (hooks / "job.toml").write_text(
        '[model]\nhf_checkpoint = "m"\n[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 2\nmax_turns = 3\n'
    )
    assert main(["check", "hook", hook, *flags]) == code
    printed, logged = capfd.readouterr()
    assert all(part in printed for part in parts), printed
    assert all(line.startswith(("ok      ", "failed  ")) for line in printed.splitlines())
    assert logged == ""


ROOT = Path(__file__).parents[3]
STRICT = """
import json
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

class Trip(BaseModel):
    city: str = Field(min_length=3)
    days: int = Field(ge=2, le=5)
    kind: str = Field(json_schema_extra={"enum": ["rail", "bus"]})

TRIP = {"type": "function", "function": {"name": "plan", "parameters": Trip.model_json_schema()}}

def client_of(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

async def calls_a_tool(args, task, base_url):
    messages = [{"role": "user", "content": task.prompt}]
    async with client_of(base_url) as client:
        for turn in range(5):
            made = await client.chat.completions.create(model="policy", messages=messages, tools=[TRIP])
            message = made.choices[0].message
            if not message.tool_calls:
                assert turn == 1, "the tool was never called"
                return float(message.content == task.label)
            (call,) = message.tool_calls
            Trip.model_validate_json(call.function.arguments)
            messages += [message.model_dump(exclude_none=True),
                         {"role": "tool", "tool_call_id": call.id, "content": "done"}]
"""


def checked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", "hook", *words])
    return code, capfd.readouterr().out


def test_an_agent_of_a_strict_client_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.py").write_text(STRICT)
    code, said = checked(capfd, f"{tmp_path / 'agent.py'}:calls_a_tool")
    assert "plays a prompt: reward" in said
    assert code == 0


OF_THE_DOCUMENTS = """
from headrace.hooks import Sample
from headrace.hooks.kit import build_loss_mask, extract_tool_call, generate_single

async def execute_tool(call):
    return str(call)

def compute_reward(sample):
    return float(sample.response == sample.label)

async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        conversation = sample.prompt if isinstance(sample.prompt, list) else [
            {"role": "user", "content": sample.prompt}
        ]
        for turn in range(args.max_turns):
            response = await generate_single(conversation)
            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = await execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                sample.response = response
                break
        sample.reward = compute_reward(sample)
        sample.loss_mask = build_loss_mask(sample)
    return samples
"""


def blocks_of(document: str, *functions: str) -> dict[str, str]:
    """The document's blocks of Python that define one of the functions, by that function and a number."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return {f"{name}{place}": code for place, code in enumerate(blocks) for name in functions if f"def {name}(" in code}


IN_DOCUMENTS = {
    "the documents'": OF_THE_DOCUMENTS,
    **blocks_of("README.md", "generate"),
    **blocks_of("docs/hooks.md", "generate", "custom_generate"),
}


@pytest.mark.parametrize("code", IN_DOCUMENTS.values(), ids=list(IN_DOCUMENTS))
def test_generate_functions_of_the_documents_pass_without_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a hub that is asked says so at once
    (tmp_path / "own.py").write_text(code)
    name = "custom_generate" if "def custom_generate(" in code else "generate"
    result, said = checked(capfd, f"{tmp_path / 'own.py'}:{name}")
    assert "response tokens" in said, said
    assert result == 0


OF_A_NEIGHBOUR = (
    "from shelf_of_prompts import Shelf\n\nclass _Second(Shelf):\n    pass\n\nclass Mine(_Second):\n    pass\n"
)


def test_a_bare_file_with_an_inherited_get_samples_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "from headrace.hooks import RolloutDataSource\n\nclass Shelf(RolloutDataSource):\n    pass\n"
    (tmp_path / "shelf_of_prompts.py").write_text(source)
    (tmp_path / "own.py").write_text(OF_A_NEIGHBOUR)
    result, said = checked(capfd, str(tmp_path / "own.py"))
    assert "is a data_source class" in said, said
    assert "own.py:Mine" in said
    assert result == 0
