"""`headrace samples` shows every turn of a conversation with its role, and divides prompt and response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.hooks import HookArgs, Sample, from_hook, run_generate
from headrace.run_folder import RunFolder, ServiceEntry
from headrace.sample_log import Answer, SampleLog
from headrace.score import ScoreItem
from headrace.trajectory import Sample as WireSample
from headrace.trajectory import whole_conversation
from tests.support.agents import producing
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.ledgers.answers import answered
from tests.support.models.chat_templates import make_chat_tokenizer

USES_TOOLS = """
import openai

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}

async def run(args, task, base_url):
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"what": "the Nile"}'}}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": task.prompt},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "6,650 km"}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        made = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        messages += [{"role": "assistant", "content": made.choices[0].message.content},
                     {"role": "user", "content": [{"type": "text", "text": "in miles"}, {"type": "text", "text": "?"}]}]
        await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    return 1.0
"""


def shown(folder: Path, capsys: pytest.CaptureFixture[str], sample: WireSample, *words: str) -> str:
    run = RunFolder(folder / "shown")
    run.path.mkdir(parents=True)
    run.write_services({"buffer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    SampleLog(run.samples).write_step(1, 0, [Answer.of(sample, 1)], 1 << 20)
    capsys.readouterr()
    assert main(["samples", str(run.path), *words]) == 0
    return capsys.readouterr().out


def in_order(text: str, *parts: str) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


async def test_every_turn_of_an_agent_is_shown_with_its_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        *("system:\nbe brief\n", "user:\n2 + 2?\n", "assistant:\n", "look_up", "the Nile"),
        *("tool:\n6,650 km\n", "assistant:\n", "user:\nin miles?\n", "assistant:\n"),
    )
    async with producing(tmp_path, USES_TOOLS, lambda job: lambda number: FakeEngine(WIRE), num_prompts=0) as made:
        (sample, *_) = await made.play()
    said = shown(tmp_path, capsys, WireSample.unpack(sample.pack()))
    assert in_order(said, *parts), said


async def test_a_scorer_sees_the_conversation_with_its_calls_of_tools(tmp_path: Path) -> None:
    async with producing(tmp_path, USES_TOOLS, lambda job: lambda number: FakeEngine(WIRE), num_prompts=0) as made:
        (sample, *_) = await made.play()
    item = ScoreItem.unpack(ScoreItem.of(sample).pack())
    messages = whole_conversation(item.hook_fields)
    assert [message["role"] for message in messages[:4]] == ["system", "user", "assistant", "tool"]
    called = {"name": "look_up", "arguments": '{"what": "the Nile"}'}
    assert messages[2] == {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": called}]}
    assert messages[3] == {"role": "tool", "content": "6,650 km", "tool_call_id": "c1"}


KIT = """
from headrace.hooks.kit import chat

async def talks(args, sample, sampling_params):
    messages = [{"role": "user", "content": sample.prompt}]
    for answer in ("that is red", "that is blue"):
        messages.append(await chat(messages))
        messages.append({"role": "user", "content": answer})
    messages.append(await chat(messages))
    sample.response = messages[-1].content
    return sample
"""


async def test_every_turn_of_a_function_of_the_kit_is_shown_with_its_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("user:\nwhich color?\n", "user:\nthat is red\n", "user:\nthat is blue\n", "assistant:\n")
    make_chat_tokenizer("qwen2.5").save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(KIT)
    engine = FakeEngine()
    await engine.start(seconds=60)
    host, port = engine.url.removeprefix("http://").split(":")
    args = HookArgs(
        {
            "hf_checkpoint": str(tmp_path),
            "generate_timeout_seconds": 60.0,
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
        }
    )
    asked = Sample(index=0, prompt="which color?")
    try:
        path = f"{tmp_path / 'own.py'}:talks"
        ((made,),) = await run_generate(path, args, [asked], {"max_new_tokens": 4}, evaluation=False)
    finally:
        await engine.stop()
    made.weight_versions = ["0"]
    said = shown(tmp_path, capsys, from_hook(made, sample_id="g/0", group_id="g", index=0))
    assert in_order(said, *parts), said


def test_prompt_and_response_are_divided_without_colors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(tmp_path, capsys, answered("g/0", "1 + 1 = ", "2\n", group_id="g", reward=1.0))
    assert "prompt:\n1 + 1 = \nresponse:\n2\n" in said, said


def test_a_search_finds_what_an_early_turn_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[dict[str, Any]] = [{"role": role, "content": f"{role} said this"} for role in ("user", "assistant")]
    sample = answered("g/0", "p", "r", group_id="g", reward=1.0)
    object.__setattr__(sample, "hook_fields", {"turns": [*turns, {"role": "user", "content": "Nile"}]})
    assert "Nile" in shown(tmp_path, capsys, sample, "--search", "nile")
