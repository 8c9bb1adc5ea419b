"""Anthropic's Messages API: the pair of functions, and the endpoint as the `anthropic` package sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from headrace.errors import InvalidArgument
from headrace.session import RecordedAnswer
from headrace.trajectory import Status
from services.rollout.agents.dialects.core import Call, Reply
from services.rollout.agents.dialects.messages import error_body, read_messages
from tests.support.scripted_endpoint import USER, Served, serve, serving

TOOL: Any = {"name": "look_up", "description": "looks up", "input_schema": {"type": "object", "properties": {}}}
CHANGED = {"type": "thinking", "thinking": "ham", "signature": "headrace.aG0="}
CALLS = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>\n'


def asked(**body: Any) -> Any:
    return read_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **body}).encode(), "m").asked


def reply(
    text: str = "", thought: str = "", *calls: Call, status: Status = Status.COMPLETED, stop: Any = None
) -> Reply:
    return Reply(RecordedAnswer((1, 2), (-1.0, -2.0), (), status, text), text, calls, thought, stop)


def test_blocks_become_the_messages_of_a_chat_template() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"q": 1}},
                {"type": "tool_use", "id": "c2", "name": "look_up", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "user", "content": "please"},
        {"role": "system", "content": "Now in French."},
    ]
    system = [{"type": "text", "text": "You", **cached}, {"type": "text", "text": "are"}]
    found = asked(system=system, messages=messages, tools=[TOOL], stop_sequences=["x"], top_k=5)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"q": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "look_up", "arguments": {}}},
    ]
    assert found.messages == [
        {"role": "system", "content": "You\n\nare"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo", "tool_calls": calls},
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "look_up"},
        {"role": "tool", "content": "Error: x", "tool_call_id": "c2", "name": "look_up"},
        {"role": "user", "content": "go on\n\nplease"},
        {"role": "system", "content": "Now in French."},
    ]
    (tool,) = found.tools
    assert tool["function"] == {"name": "look_up", "description": "looks up", "parameters": TOOL["input_schema"]}
    assert (found.settings.values["max_new_tokens"], found.settings.values["top_k"], found.settings.stops) == (
        9,
        5,
        ("x",),
    )


def test_a_reply_becomes_blocks_and_the_same_blocks_as_events() -> None:
    for said, reason in (
        (reply("So", "hm", Call("c", "f", '{"a": 1}'), Call("d", "f", "{}")), "tool_use"),
        (reply("So"), "end_turn"),
        (reply("", "hm", status=Status.TRUNCATED), "max_tokens"),
        (reply("So", stop="x"), "stop_sequence"),
        (reply(), "end_turn"),
    ):
        exchange = read_messages(json.dumps({"messages": [USER]}).encode(), "m")
        body: Any = exchange.body([said], 7)
        events = (
            exchange.begin(7) + exchange.progress(said.thought[:1], "") + exchange.progress(said.thought, said.text[:1])
        )
        built, usage, ending = built_from(events + exchange.end(said, 7))
        assert built == body["content"]
        assert ending == {"stop_reason": reason, "stop_sequence": said.stop}
        assert ending.items() <= body.items()
        assert usage["output_tokens"] == body["usage"]["output_tokens"] == 2
        assert body["usage"]["input_tokens"] == 7


def built_from(events: bytes) -> tuple[list[Any], dict[str, int], dict[str, Any]]:
    """The blocks, the usage and the ending that a stream tells, whose events stand in the right order."""
    blocks, order, usage, ending = list[Any](), list[str](), {}, {}
    for event in events.decode().strip().split("\n\n"):
        name, data = (line.split(": ", 1)[1] for line in event.split("\n"))
        found = json.loads(data)
        assert found["type"] == name
        order.append(name)
        match found:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                blocks.append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **delta}}:
                assert index == len(blocks) - 1
                ((field, text),) = delta.items()
                field = "input" if kind == "input_json_delta" else field
                blocks[-1][field] = (blocks[-1][field] or "") + text
            case {"type": "message_delta", "delta": ending, "usage": usage}:
                pass
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    inner = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for number, name in enumerate(order) if order[number - 1 : number] != [name]] == [
        *("message_start", *(inner * len(blocks)), "message_delta", "message_stop"),
    ]
    return blocks, usage, ending


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "prefill"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}]}]}, "'z'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, USER]}, "redacted_thinking"),
        ({"messages": [{"role": "tool", "content": "s"}]}, "tool"),
        ({"messages": [{"role": "assistant", "content": [CHANGED]}, USER]}, "changed"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "any"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look_up"}}, "tool"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config"),
        ({"output_config": {"task_budget": 1}}, "task_budget"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        asked(**body)
    assert named in refused.value.message


def test_what_asks_for_nothing_is_taken() -> None:
    for body in (
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "mcp_servers": []},
        {"tools": [{**TOOL, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "high"}},
    ):
        assert asked(**body).messages == [USER], body
    assert asked(tools=[TOOL], tool_choice={"type": "none"}).tools is None


def test_errors_have_anthropics_form() -> None:
    assert error_body(429, "rate_limit_error", "later", None, None) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "later"},
    }
    assert error_body(503, "service_unavailable_error", "m", None, None)["error"]["type"] == "overloaded_error"
    too_long = error_body(400, "invalid_request_error", "9 tokens", "messages", "context_length_exceeded")
    assert too_long["error"] == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for one in serve(tmp_path, "qwen3"):
        yield one


def client(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)


async def test_the_package_gets_blocks_and_the_session_continues_its_tokens(served: Served) -> None:
    served.script.says = "<think>\nLook  it up.\n\n</think>\n\nSo: " + CALLS * 2
    messages: list[Any] = [USER]
    async with client(served) as asking:
        for number in range(3):
            asks: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [TOOL], "system": "Be brief."}
            if number % 2:
                async with asking.messages.stream(**asks) as stream:
                    made = await stream.get_final_message()
            else:
                made = await asking.messages.create(**asks)
            assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert made.stop_reason == "tool_use"
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"{number}"}
                for block in made.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
        messages[-1]["content"].append({"type": "text", "text": "and now?"})  # the template would drop thoughts here
        await asking.messages.create(**asks)
    (branch,) = served.opened.record.branches()
    prompt, generation = served.script.generations[-1]
    assert (*branch.prompt, *branch.response) == (*prompt, *generation.tokens)
    assert sum(branch.loss_mask) == sum(len(made.tokens) for _, made in served.script.generations)


async def test_a_stream_tells_thoughts_and_text_as_they_are_sampled(served: Served) -> None:
    served.script.says = "<think>\nOne two.\n</think>\n\nThree <b> four."
    asks: Any = {"model": "m", "max_tokens": 500, "messages": [USER]}
    async with client(served) as asking, asking.messages.stream(**asks) as stream:
        deltas = [event async for event in stream if event.type in ("thinking", "text")]
        made = await stream.get_final_message()
    assert len(deltas) > 10
    assert [getattr(block, block.type) for block in made.content] == ["One two.", "Three <b> four."]
    async with client(served) as asking, asking.messages.stream(tools=[TOOL], **asks) as stream:
        kinds = [event.type async for event in stream if event.type in ("thinking", "text")]
    assert kinds.count("thinking") > 3
    assert kinds.count("text") == 1  # it might have become a call
    again = await served.post("messages", {**asks, "messages": [USER, {"role": "assistant", "content": []}, USER]})
    assert again.status_code == 200


async def test_a_thought_that_is_not_shown_comes_back_by_its_signature(served: Served) -> None:
    served.script.says = "<think>\nOne two.\n</think>\n\nThree."
    messages: list[Any] = [USER]
    async with client(served) as asking:
        for _ in range(2):
            async with asking.messages.stream(
                model="m", max_tokens=500, messages=messages, thinking={"type": "adaptive", "display": "omitted"}
            ) as stream:
                made = await stream.get_final_message()
            assert [getattr(block, block.type) for block in made.content] == ["", "Three."]
            messages += [made.to_param(), USER]
    assert len(served.opened.record.branches()) == 1


async def test_tokens_are_counted_as_they_are_asked(served: Served) -> None:
    asks: Any = {"model": "m", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    async with client(served) as asking:
        counted = await asking.messages.count_tokens(**asks)
        made = await asking.messages.create(max_tokens=9, **asks)
    assert counted.input_tokens == made.usage.input_tokens == len(served.script.generations[0][0])
    assert len(served.script.generations) == 1


async def test_thinking_is_the_chat_templates(served: Served) -> None:
    for thinks, ends in (
        ({"type": "disabled"}, "</think>\n\n"),
        ({"type": "adaptive"}, "assistant\n"),
        (None, "assistant\n"),
    ):
        assert (await served.post("messages", {"messages": [USER], "thinking": thinks})).status_code == 200
        assert served.script.prompts[-1].endswith(ends)


async def test_a_thought_that_the_template_opens_is_a_block_and_cannot_be_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path, "deepseek_r1_distill_qwen", end="<｜end▁of▁sentence｜>") as served:
        served.script.says = "hm</think>\n\nYes."
        messages: list[Any] = [USER]
        for _ in range(2):
            made = (await served.post("messages", {"messages": messages})).json()
            assert [block["type"] for block in made["content"]] == ["thinking", "text"]
            messages += [{"role": "assistant", "content": made["content"]}, USER]
        assert len(served.opened.record.branches()) == 1
        refused = await served.post("messages", {"messages": [USER], "thinking": {"type": "disabled"}})
    assert (refused.status_code, "thinking" in refused.json()["error"]["message"]) == (400, True)


async def test_errors_reach_the_package_as_its_own(served: Served) -> None:
    async with client(served) as asking:
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await asking.messages.create(
                model="m", max_tokens=9, messages=[USER], tools=[TOOL], tool_choice={"type": "any"}
            )
        served.script.says, served.script.fails_after = "many words", 3
        with pytest.raises(anthropic.APIStatusError, match="log says why"):
            async with asking.messages.stream(model="m", max_tokens=500, messages=[USER]) as stream:
                await stream.get_final_message()
    for version, status in (("2023-01-01", 400), ("2023-06-01", 200)):
        response = await served.post("messages", {"messages": [USER]}, headers={"anthropic-version": version})
        assert response.status_code == status
    assert len(served.opened.record.branches()) == 1


async def test_a_stop_sequence_is_named_and_left_out(served: Served) -> None:
    served.script.says = "one STOP two"
    made = (await served.post("messages", {"messages": [USER], "stop_sequences": ["END", "STOP"]})).json()
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "STOP")
    assert made["content"] == [{"type": "text", "text": "one "}]
