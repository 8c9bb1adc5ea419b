"""`chat` of the kit: messages with tool calls, continued by the tokens that were sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.hooks import HookArgs, Sample
from headrace.hooks.kit import Tools, chat, extract_tool_call
from headrace.hooks.kit.conversation import Call, attach_tokens, calling, renderer_of
from tests.support.fakes.scripted_engine import ScriptedEngine
from tests.support.models.chat_templates import make_chat_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}
CALLED = 'I add.\n<tool_call>\n{"name":  "add", "arguments": {"b": 4, "a": 3}}\n</tool_call>'  # by no template
tools = Tools()


@tools.register
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ScriptedEngine]:
    tokenizer = make_chat_tokenizer("qwen2.5")
    tokenizer.save_pretrained(tmp_path)
    running = ScriptedEngine(tokenizer, [CALLED, "It is 7.", "Yes."])
    await running.start(seconds=60)
    yield running
    await running.stop()


def call_of(engine: ScriptedEngine, folder: Path, **args: Any) -> Call:
    host, port = engine.url.removeprefix("http://").split(":")
    options = {"hf_checkpoint": str(folder), "generate_timeout_seconds": 60.0}
    options |= {"sglang_router_ip": host, "sglang_router_port": int(port), **args}
    return Call(HookArgs(options), [Sample()], {"max_new_tokens": 200, "stop_token_ids": [engine.end_of_turn]})


async def converse(sample: Sample, most: int = 5) -> list[dict[str, Any]]:
    """Messages until the policy calls no more tool."""
    messages: list[dict[str, Any]] = [USER]
    sample.prompt = messages
    for _ in range(most):
        message = await chat(messages, tools=tools.schemas())
        messages.append(message)
        if not message.tool_calls:
            break
        messages += await tools.messages(message)
    return messages


async def test_a_message_with_tool_calls_is_continued_by_its_tokens(engine: ScriptedEngine, tmp_path: Path) -> None:
    call, sample = call_of(engine, tmp_path), Sample()
    with calling(call):
        messages = await converse(sample)
    function = {"name": "add", "arguments": {"a": 3, "b": 4}}
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "I add.\n",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "add", "content": "7", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "It is 7."},
    ]
    made = attach_tokens(sample, call)
    first, second = engine.turns[:2]
    between = made.response_length - len(first) - len(second)
    assert made.tokens[-made.response_length :][: len(first)] == first
    assert made.tokens[-len(second) :] == second
    assert made.loss_mask == [1] * len(first) + [0] * between + [1] * len(second)
    assert "7" in renderer_of(call.args).decode(made.tokens[: -len(second)][-between:], special=True)
    assert (made.status, made.response, len(made.rollout_log_probs or ())) == (
        Sample.Status.COMPLETED,
        "It is 7.",
        made.response_length,
    )
    assert {type(message.get("content")) for message in made.prompt} == {str}


async def test_a_conversation_that_ends_at_max_turns_in_a_call_is_truncated_and_shows_the_call(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    call, sample = call_of(engine, tmp_path), Sample()
    with calling(call):
        await converse(sample, most=1)
    made = attach_tokens(sample, call)
    assert (made.status, made.response) == (Sample.Status.TRUNCATED, CALLED)
    limited = call_of(engine, tmp_path, max_turns=1)
    with calling(limited):
        messages = await converse(sample)
    assert (messages[-1], len(messages)) == ({"role": "assistant", "content": ""}, 4)
    assert attach_tokens(sample, limited).status is Sample.Status.TRUNCATED


async def test_a_message_whose_calls_were_edited_is_a_new_prompt(engine: ScriptedEngine, tmp_path: Path) -> None:
    with calling(call_of(engine, tmp_path)):
        first = await chat([USER], tools.schemas())
        first["tool_calls"][0]["function"]["arguments"]["a"] = 5
        second = await chat([USER, first, {"role": "tool", "content": "9"}], tools.schemas())
    assert second.content.turn.parent is None
    assert '"a": 5' in renderer_of(call_of(engine, tmp_path).args).decode(second.content.turn.context, special=False)


async def test_without_tools_a_message_is_its_whole_text(engine: ScriptedEngine, tmp_path: Path) -> None:
    with calling(call_of(engine, tmp_path)):
        message = await chat([USER], sampling_params={"temperature": 0.5})
    assert message == {"role": "assistant", "content": CALLED}
    assert extract_tool_call(message.content) == {"name": "add", "arguments": {"a": 3, "b": 4}}
