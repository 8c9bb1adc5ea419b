"""OpenAI's Responses API: the pair of functions, and the endpoint as the `openai` package sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.errors import InvalidArgument
from headrace.session import RecordedAnswer
from headrace.trajectory import Status
from services.rollout.agents.dialects.core import Call, Reply, assistant_message, sign
from services.rollout.agents.dialects.responses import read_response
from tests.support.scripted_endpoint import Served, serve

TOOL: Any = {"type": "function", "name": "look_up", "strict": True, "parameters": {"type": "object", "properties": {}}}
CALLS = '<tool_call>\n{"name": "look_up", "arguments": {"q": "a"}}\n</tool_call>\n'
THINKS = "<think>\nLook  it up.\n\n</think>\n\nSo: "


def read(kept: Any = None, **body: Any) -> Any:
    return read_response(json.dumps({"model": "m", "input": "hi", **body}).encode(), "m", {} if kept is None else kept)


def reply(text: str = "", thought: str = "", *calls: Call, status: Status = Status.COMPLETED) -> Reply:
    answer = RecordedAnswer((1, 2), (-1.0, -2.0), (), status, text)
    return Reply(answer, text, calls, thought, decode=lambda tokens: "ab"[tokens[0] - 1])


def test_items_become_the_messages_of_a_chat_template() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "skills"}]},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sign("hm")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"q": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "Done"},
        {"role": "assistant", "content": "Really"},
        {"role": "developer", "content": "Now in French."},
    ]
    space = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [{**TOOL, "name": "spawn"}]}
    found = read(input=items, instructions="You are", tools=[TOOL, space, {"type": "web_search"}]).asked
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"q": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "agents__spawn", "arguments": {}}},
    ]
    assert found.messages == [
        {"role": "system", "content": "You are\n\nskills"},
        {"role": "user", "content": "a"},
        assistant_message("hm", "So", calls),
        {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "look_up"},
        {"role": "tool", "content": "two", "tool_call_id": "c2", "name": "agents__spawn"},
        {"role": "assistant", "content": "Done"},
        {"role": "assistant", "content": "Really"},
        {"role": "developer", "content": "Now in French."},
    ]
    assert [tool["function"]["name"] for tool in found.tools] == ["look_up", "agents__spawn"]
    assert found.tools[1]["function"]["description"].startswith("Helpers.")


@pytest.mark.parametrize(
    "said",
    [
        reply("So", "hm", Call("c", "f", '{"a": 1}'), Call("d", "agents__spawn", "{}")),
        reply("So"),
        reply("", "hm", status=Status.TRUNCATED),
        reply("", "", Call("c", "f", "{}")),
        reply(),
    ],
    ids=lambda said: f"{said.thought}-{said.text}-{len(said.calls)}",
)
@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content", "message.output_text.logprobs"]])
def test_a_reply_becomes_items_and_the_same_items_as_events(said: Reply, include: list[str]) -> None:
    space = {"type": "namespace", "name": "agents", "tools": [{**TOOL, "name": "spawn"}]}
    exchange = read(include=include, tools=[space])
    body: Any = exchange.body([said], 7)
    events = (
        exchange.begin(7) + exchange.progress(said.thought[:1], "") + exchange.progress(said.thought, said.text[:1])
    )
    told = [
        json.loads(event.split("\ndata: ")[1]) for event in (events + exchange.end(said, 7)).decode().split("\n\n")[:-1]
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{body['status']}"
    assert told[-1]["response"] == body
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == body["output"]
    for index, item in enumerate(body["output"]):
        own = [event for event in told if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    for call, item in zip(said.calls, [one for one in body["output"] if one["type"] == "function_call"], strict=True):
        spawns = call.name == "agents__spawn"
        assert (item["name"], item.get("namespace")) == (("spawn", "agents") if spawns else (call.name, None))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "item_reference"),
        ({"input": [{"role": "critic", "content": "no"}]}, "critic"),
        ({"input": [{"type": "function_call_output", "call_id": "z", "output": ""}]}, "z"),
        ({"input": [{"type": "reasoning", "id": "rs_of_another", "summary": []}]}, "reasoning"),
        ({"input": [{"type": "reasoning", "encrypted_content": "headrace.%%%"}]}, "changed"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "custom"),
        ({"tools": [{"type": "file_search"}]}, "file_search"),
        ({"tools": [TOOL], "tool_choice": "required"}, "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "look_up"}}, "look_up"),
        ({"previous_response_id": "resp_unknown"}, "resp_unknown"),
        ({"include": ["file_search_call.results"]}, "file_search_call"),
        ({"reasoning": {"summary": "detailed"}}, "detailed"),
        ({"reasoning": {"mode": "pro"}}, "mode"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "messages"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(**body)
    assert named in refused.value.message


def test_outside_a_session_nothing_is_kept() -> None:
    for body in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(InvalidArgument, match=next(iter(body))):
            read_response(json.dumps({"input": "hi", **body}).encode(), "m", None)
    assert read_response(b'{"input": "hi"}', "m", None).asked.keep_as is None
    assert read(store=False).asked.keep_as is None


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for one in serve(tmp_path, "qwen3"):
        yield one


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def answered(asking: openai.AsyncOpenAI, *, stream: bool, **asks: Any) -> Any:
    if not stream:
        return await asking.responses.create(model="m", **asks)
    async with asking.responses.stream(model="m", **asks) as events:
        return await events.get_final_response()


def require_one_branch(served: Served) -> None:
    (branch,) = served.opened.record.branches()
    prompt, generation = served.script.generations[-1]
    assert (*branch.prompt, *branch.response) == (*prompt, *generation.tokens)
    assert sum(branch.loss_mask) == sum(len(made.tokens) for _, made in served.script.generations)


@pytest.mark.parametrize("way", ["items", "sealed", "previous"])
async def test_the_package_gets_items_and_the_session_continues_its_tokens(served: Served, way: str) -> None:
    served.script.says = THINKS + CALLS * 2
    items: list[Any] = [{"role": "user", "content": "hi"}]
    asks: dict[str, Any] = {"instructions": "Be brief.", "tools": [TOOL]}
    if way == "sealed":  # as Codex does
        asks |= {"include": ["reasoning.encrypted_content"], "store": False}
    async with client(served) as asking:
        for number in range(4):
            made = await answered(asking, stream=number % 2 == 1, input=items, **asks)
            assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call"]
            assert (made.output_text, made.status) == ("So: ", "completed")
            said = [item.to_dict() for item in made.output]
            if way == "sealed":
                said[0].pop("content")
            outputs: list[Any] = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "1"} for item in said[2:]
            ]
            outputs += [{"role": "user", "content": "and now?"}] if number == 2 else []
            items = outputs if way == "previous" else [*items, *said, *outputs]
            asks |= {"previous_response_id": made.id} if way == "previous" else {}
    require_one_branch(served)
    usage = made.usage
    assert usage.output_tokens == len(served.script.generations[-1][1].tokens)
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


async def test_a_previous_response_may_be_asked_about_twice(served: Served) -> None:
    async with client(served) as asking:
        first = await answered(asking, stream=False, input="hi")
        for question in ("why?", "how?"):
            await answered(asking, stream=True, input=question, previous_response_id=first.id)
        forgotten = await answered(asking, stream=False, input="hi", store=False)
        with pytest.raises(openai.BadRequestError) as refused:
            await answered(asking, stream=False, input="why?", previous_response_id=forgotten.id)
    assert refused.value.code == "previous_response_not_found"
    assert len(served.opened.record.branches()) == 3
    assert sum(len(made.tokens) for _, made in served.script.generations) == sum(
        sum(branch.loss_mask) for branch in served.opened.record.branches()
    )


async def test_a_stream_tells_thoughts_and_text_as_they_are_sampled_and_how_it_failed(served: Served) -> None:
    served.script.says = "<think>\nOne two.\n</think>\n\nThree <b> four."
    async with client(served) as asking:
        async with asking.responses.stream(model="m", input="hi") as events:
            kinds = [event.type async for event in events]
        assert kinds.count("response.output_text.delta") > 5 < kinds.count("response.reasoning_text.delta")
        served.script.fails_after = 3
        failed = [event async for event in await asking.responses.create(model="m", input="hi", stream=True)][-1]
    assert failed.type == "response.failed"
    assert "log says why" in str(failed.response.error)


async def test_a_schema_acts_outside_a_session_and_is_refused_in_one(served: Served) -> None:
    text = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}
    assert (await served.post("responses", {"input": "hi", "text": text})).status_code == 400
    assert (await served.post("responses", {"input": "hi", "text": text}, recorded=False)).status_code == 200
    assert served.script.params[-1]["json_schema"] == '{"type":"object"}'


async def test_a_model_is_described_to_clients_of_both_kinds(served: Served) -> None:
    async with client(served) as asking:
        assert (await asking.models.retrieve("tiny")).owned_by == "headrace"
        with pytest.raises(openai.NotFoundError, match="'tiny'"):
            await asking.models.retrieve("another")
