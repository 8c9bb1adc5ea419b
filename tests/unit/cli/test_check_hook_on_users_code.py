"""`headrace check hook` passes what works in a run: agents of strict clients, the documents' functions, bare files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.main import main

ROOT = Path(__file__).parents[3]
STRICT = """
import json
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field, TypeAdapter

class Trip(BaseModel):
    city: str = Field(min_length=3)
    days: int = Field(ge=2, le=5)
    kind: str = Field(json_schema_extra={"enum": ["rail", "bus"]})

TRIP = {"type": "function", "function": {"name": "plan", "parameters": Trip.model_json_schema()}}

def client_of(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

async def validated(args, task, base_url):
    async with client_of(base_url) as client:
        made = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.prompt}])
    made = ChatCompletion.model_validate(made.model_dump())
    assert made.model == "policy" and made.object == "chat.completion" and made.id
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    return float(made.choices[0].message.content == task.label)

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

async def streams_a_call(args, task, base_url):
    async with client_of(base_url) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.prompt}], tools=[TRIP], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    arguments = "".join(call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ())
    return float(Trip.model_validate_json(arguments).days)
"""


def checked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", "hook", *words])
    return code, capfd.readouterr().out


@pytest.mark.parametrize("agent", ["validated", "calls_a_tool", "streams_a_call"])
def test_agents_of_strict_clients_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str], agent: str) -> None:
    (tmp_path / "agent.py").write_text(STRICT)
    code, said = checked(capfd, f"{tmp_path / 'agent.py'}:{agent}")
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


GENERATES = {
    "the documents'": OF_THE_DOCUMENTS,
    **blocks_of("README.md", "generate"),
    **blocks_of("docs/hooks.md", "generate", "custom_generate"),
}


@pytest.mark.parametrize("code", GENERATES.values(), ids=list(GENERATES))
def test_generate_functions_of_the_documents_pass_without_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a hub that is asked says so at once
    (tmp_path / "own.py").write_text(code)
    name = "custom_generate" if "def custom_generate(" in code else "generate"
    result, said = checked(capfd, f"{tmp_path / 'own.py'}:{name}")
    assert "response tokens" in said, said
    assert result == 0


def test_an_engine_that_was_not_asked_for_log_probs_gives_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks_of("README.md", "generate").values()
    (tmp_path / "own.py").write_text(code.replace('"return_logprob": True', '"return_logprob": False'))
    result, said = checked(capfd, f"{tmp_path / 'own.py'}:generate")
    assert "KeyError: 'output_token_logprobs'" in said
    assert result == 1


SOURCES = {
    "of headrace": "from headrace.hooks import RolloutDataSource\n\nclass Mine(RolloutDataSource):\n    pass\n",
    "by a module's name": "import headrace.hooks as h\n\nclass Mine(h.RolloutDataSourceWithBuffer):\n    shelf = 3\n",
    "over two classes": (
        "class _First:\n    def get_samples(self, n):\n        from headrace.hooks import Sample\n"
        "        return [Sample(prompt='a') for _ in range(n)]\n\n"
        "class _Second(_First):\n    pass\n\nclass Mine(_Second):\n    pass\n"
    ),
    "of a neighbour": "from shelf_of_prompts import Shelf\n\nclass Mine(Shelf):\n    pass\n",
}


@pytest.mark.parametrize("code", SOURCES.values(), ids=list(SOURCES))
def test_a_bare_file_with_an_inherited_get_samples_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    (tmp_path / "shelf_of_prompts.py").write_text(SOURCES["of headrace"].replace("Mine", "Shelf"))
    (tmp_path / "own.py").write_text(code)
    result, said = checked(capfd, str(tmp_path / "own.py"))
    assert "is a data_source class" in said, said
    assert "own.py:Mine" in said
    assert result == 0


def test_a_bare_file_with_an_inherited_reward_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "class _Judge:\n    def compute_reward(self, prompts, responses):\n        return [0.5 for _ in prompts]\n\n"
        "class Mine(_Judge):\n    def __init__(self, model_path):\n        self.path = model_path\n"
    )
    result, said = checked(capfd, str(tmp_path / "own.py"), "--reward-model-path", "/folder")
    assert "[0.5, 0.5, 0.5, 0.5]" in said, said
    assert result == 0
