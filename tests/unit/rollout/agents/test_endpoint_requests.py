"""What a request of the endpoint asks acts, or is refused by its name; calls in its answers are those of its tools."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.scripted_endpoint import USER, Served, serve

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "most": {"type": "number"}}},
    },
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for one in serve(tmp_path, "qwen3"):
        yield one


@pytest.fixture
async def opens_thoughts(tmp_path: Path) -> AsyncIterator[Served]:
    async for one in serve(tmp_path, "deepseek_r1_distill_qwen"):
        yield one


BENDING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"frequency_penalty": -0.5},
    {"min_p": 0.05},
    {"min_tokens": 3},
    {"ebnf": 'root ::= "yes"'},
    {"json_schema": {"type": "object"}},
    {"guided_regex": "a+"},
    {"guided_grammar": 'root ::= "no"'},
    {"structured_outputs": {"choice": ["x", "y"]}},
    {"response_format": {"type": "json_object"}},
]
UNKNOWN: list[dict[str, Any]] = [
    {"functions": [{"name": "f", "parameters": {}}]},
    {"logit_bias": {"5": 10}},
    {"typical_p": 0.9},
    {"ignore_eos": True},
    {"add_generation_prompt": False},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinkin": False}},
    {"chat_template_kwargs": {"messages": []}},
    {"structured_outputs": {"structural_tag": "{}"}},
]


@pytest.mark.parametrize("body", [*BENDING, *UNKNOWN], ids=str)
async def test_what_would_bend_a_recorded_response_is_refused_by_its_name(served: Served, body: dict[str, Any]) -> None:
    reply = await served.ask(**body)
    assert reply.status_code == 400
    assert next(iter(body)) in reply.json()["error"]["message"]
    assert served.script.prompts == []


async def test_outside_a_session_the_engine_gets_what_it_can_do(served: Served) -> None:
    for body, params in (
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"frequency_penalty": -0.5, "presence_penalty": 2}, {"frequency_penalty": -0.5, "presence_penalty": 2}),
        ({"min_p": 0.05, "top_k": 7}, {"min_p": 0.05, "top_k": 7}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
        ({"ebnf": "root ::= x"}, {"ebnf": "root ::= x"}),
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        ({"guided_choice": ["a.b", "c"]}, {"regex": r"(a\.b|c)"}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": '{"type":"object"}'}),
        ({"structured_outputs": {"regex": "b*", "json": None}}, {"regex": "b*"}),
    ):
        reply = await served.ask(recorded=False, **body)
        assert reply.status_code == 200, (body, reply.text)
        assert served.script.params[-1].items() >= params.items(), body


@pytest.mark.parametrize(
    "body",
    [
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"frequency_penalty": 3},
        {"min_tokens": 9, "max_tokens": 8},
        {"stop_token_ids": [-1]},
        {"regex": "a", "ebnf": "b"},
        {"guided_choice": []},
        {"guided_json": "no json"},
    ],
    ids=str,
)
async def test_outside_a_session_values_out_of_range_are_refused(served: Served, body: dict[str, Any]) -> None:
    assert (await served.ask(recorded=False, **body)).status_code == 400


async def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    for body in (
        {"user": "me", "parallel_tool_calls": True, "frequency_penalty": 0, "store": False, "metadata": {"a": "b"}},
        {"min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": None, "functions": [], "best_of": 1},
        {"guided_json": None, "structured_outputs": None, "ignore_eos": False, "modalities": ["text"]},
    ):
        assert (await served.ask(**body)).status_code == 200, body


async def test_variables_of_the_chat_template_act_for_their_request(served: Served) -> None:
    for recorded in (True, False):
        for thinks in (False, True):
            reply = await served.ask(recorded=recorded, chat_template_kwargs={"enable_thinking": thinks})
            assert reply.status_code == 200
            assert served.script.prompts[-1].endswith("<think>\n\n</think>\n\n") == (not thinks)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "name": "f", "content": "RESULT-17"},
        {"role": "developer", "content": "RESULT-17"},
        {"role": "user", "content": [{"type": "text", "text": "RESULT-17"}]},
        {"role": "tool", "content": [{"type": "text", "text": "RESULT"}, {"type": "text", "text": "-17"}]},
    ],
    ids=lambda message: str(message["role"]),
)
async def test_every_messages_text_reaches_the_prompt_or_the_request_is_refused(
    served: Served, message: dict[str, Any]
) -> None:
    reply = await served.ask(messages=[message, USER])
    if reply.status_code == 400:
        assert repr(message["role"]) in reply.json()["error"]["message"]
    else:
        assert "RESULT-17" in served.script.prompts[-1]
        assert "'type'" not in served.script.prompts[-1]


async def test_the_older_form_of_calls_is_refused(served: Served) -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    reply = await served.ask(messages=[USER, old, USER])
    assert reply.status_code == 400
    assert "function_call" in reply.json()["error"]["message"]


def tagged(arguments: str, name: str = "look_up") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ('{"deep": [NaN, 1]}', {"deep": ["NaN", 1]}),
        ('"\\ud800"', "\ud800"),
        ("1e3", 1000.0),
    ],
)
async def test_arguments_leave_the_endpoint_as_json(served: Served, value: str, read: Any) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    served.script.says = tagged(f'{{"most": {value}}}')
    reply = await served.ask(tools=[LOOK_UP])
    assert reply.status_code == 200
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"], parse_constant=refuse) == {"most": read}


async def test_calls_of_an_answer_are_those_of_the_tools_that_were_offered(served: Served) -> None:
    good, other, broken = tagged('{"q": "x"}'), tagged('{"q": "y"}'), tagged('{"q": ')
    for says, num_calls in (
        (good, 1),
        (tagged("{}", "drop_table"), 0),
        ('{"name": "Grace", "born": 1906}', 0),
        ('{"name": "drop_table", "parameters": {}}', 0),
        (f"<think>\nPerhaps {good}?\n</think>\n\nNo.", 0),
        (f"<think>\nPerhaps {other}", 0),
        (f"{broken}\n{good}", 1),
        (good.removesuffix("</tool_call>"), 1),
    ):
        served.script.says = says
        message = (await served.ask(tools=[LOOK_UP], recorded=False)).json()["choices"][0]["message"]
        assert len(message.get("tool_calls") or ()) == num_calls, says
        assert num_calls or message["content"] == says


async def test_a_thought_that_the_prompt_has_opened_is_not_searched(opens_thoughts: Served) -> None:
    opens_thoughts.script.says = "I may call " + tagged('{"q": "x"}')
    message = (await opens_thoughts.ask(tools=[LOOK_UP])).json()["choices"][0]["message"]
    assert "tool_calls" not in message


CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 3000}


def _with(**fields: object) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def _schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"messages": "hello"}', r"\$\.messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "cannot be"),
        (_with(n=10**9), "n"),
        (_with(n=2, stream=True), "leave stream out"),
        (_with(max_tokens=0), "max_tokens"),
        (_with(stop=[""]), "stop"),
        (_with(logit_bias={"5": 100}), "logit_bias"),
        (_with(response_format={"type": "yaml"}), "must be text, json_object or json_schema"),
        (_with(response_format=_schema([1])), "must be a JSON object"),
        (_with(response_format=_schema({"$ref": "file:///etc/passwd"})), "references into the schema itself"),
        (_with(response_format=_schema({"const": "x" * 40_000})), "may have 32768"),
        (_with(regex="a" * 5000), "may have 4096"),
        (_with(tools=[{"type": "function"}] * 1025), "tools is 1025, must be 0 to 1024"),
        (json.dumps({"messages": [CALLS] * 2}).encode(), "tool_calls is 6000, must be 0 to 4096"),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason(served: Served, body: bytes, said: str) -> None:
    answer = await served.http.post("/v1/chat/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert re.search(said, error["message"] + str(error["param"]))
    assert (await served.ask(recorded=False)).status_code == 200


async def test_a_stream_that_breaks_off_says_so_in_an_event_and_leaves_no_record(served: Served) -> None:
    served.script.says, served.script.fails_after = "many words", 3
    lines = (await served.ask(stream=True)).text.strip().split("\n\n")
    assert len(lines) > 1
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert served.opened.record.branches() == []
