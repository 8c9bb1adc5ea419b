"""Tool calls in texts that policies write: what is a call, what is none, and the values of arguments."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.hooks.kit import extract_tool_calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "yes": {"type": "boolean"},
                    "items": {"type": "array"},
                    "place": {"$ref": "#/$defs/Place"},
                    "unit": {"enum": ["1", "2"]},
                    "any": {},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        },
    }
    for name in ("find", "save")
]
FIND, SAVE = '{"name": "find", "arguments": {"text": "x"}}', '{"name": "save", "arguments": {"text": "y"}}'
FOUND, SAVED = ("find", {"text": "x"}), ("save", {"text": "y"})
DEEPSEEK, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"


def tag(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def kimi(name: str, arguments: str) -> str:
    return f"{KIMI}functions.{name}:0<|tool_call_argument_begin|>{arguments}{KIMI_END}"


def read(text: str, tools: list[dict[str, Any]] | None = TOOLS) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in extract_tool_calls(text, tools=tools)]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Grace", "born": 1906}',
        '{"name": "Grace", "arguments": {"for": "COBOL"}}',
        f"{FIND} would find it.",
        tag('{"name": "erase", "arguments": {}}'),
        "<tool_call>erase\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        f"{DEEPSEEK}erase<｜tool▁sep｜>{{}}{DEEPSEEK_END}",
        kimi("erase", "{}"),
        '[TOOL_CALLS] [{"name": "erase", "arguments": {}}]',
        f"<think>\nI could write {tag(FIND)}\n</think>\n\nNo need.",
        f"I could write {tag(FIND)}\n</think>\n\nNo need.",
        f"<think>\n{DEEPSEEK}find<｜tool▁sep｜>{{}}{DEEPSEEK_END}",
        f"[THINK]{tag(SAVE)}[/THINK]Done.",
        "Write <tool_call>find and then what you look for.",
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x",
        tag('{"name": "find", "arguments": [1]}'),
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_not_invented(text: str) -> None:
    assert read(text) == []


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>{FIND}<|endoftext|>", [FOUND]),
        (f"{tag(FIND)}<tool_call>\n{SAVE}\n", [FOUND, SAVED]),
        (tag('{"name": "find", "arg') + tag(SAVE), [SAVED]),
        (tag("oh {") + tag(FIND), [FOUND]),
        (tag('{"name": "find", "arguments": null}'), [("find", {})]),
        (tag('{"name": "find", "parameters": {"text": "x"}, "arguments": null}'), [FOUND]),
        (tag('{"name": "find"}'), [("find", {})]),
        (tag(f"[{FIND}, {SAVE}]"), [FOUND, SAVED]),
        (tag(f"{FIND}\n{SAVE}"), [FOUND, SAVED]),
        (tag('{"name": "find", "arguments": {"text": "}</tool_call>{"}}'), [("find", {"text": "}</tool_call>{"})]),
        (tag('{"name": "find", "arguments": {"text": "<think>"}}') + tag(SAVE), [("find", {"text": "<think>"}), SAVED]),
        (tag('{"name": "find", "arguments": {"text": "a\nb"}}'), [("find", {"text": "a\nb"})]),
        (f"<think>{tag(SAVE)}</think>{tag(FIND)}", [FOUND]),
        (f"{FIND}; {SAVE}", [FOUND, SAVED]),
        (f"<|python_tag|>{FIND}\n{SAVE}<|eom_id|>", [FOUND, SAVED]),
        (f"<think>\nEasy.\n</think>\n\n{FIND}", [FOUND]),
        (f"{DEEPSEEK}find<｜tool▁sep｜>{{oh{DEEPSEEK_END}{DEEPSEEK}save<｜tool▁sep｜>{{}}", [("save", {})]),
        (f"{DEEPSEEK}function<｜tool▁sep｜>find\n```json\n{{}}\n```{DEEPSEEK_END}", [("find", {})]),
        (kimi("find", "{oh") + kimi("save", '{"text": "y"}'), [SAVED]),
        (f"[TOOL_CALLS][{FIND}]", [FOUND]),
        ('[TOOL_CALLS]find[ARGS]{"text": "x"}[TOOL_CALLS]save[ARGS]{"text": "y"}', [FOUND, SAVED]),
        ("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n<|observation|>", [FOUND]),
        (
            "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value></tool_call></arg_value>\n</tool_call>",
            [("find", {"text": "</tool_call>"})],
        ),
        ("<tool_call>find\n</tool_call>", [("find", {})]),
    ],
)
def test_no_call_is_lost(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read(text) == calls


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("text", text, text) for text in ("2031-05-17", "007", "1.10", "null", "NaN", "12:30", "{draft", "[1] see")),
        *(("text", text, text) for text in ('{"a": 1}', "True story", "-0", "1e5", "9007199254740993", " x ")),
        *(("none", text, text) for text in ("2040-12-01", "0xff", "1.50", "05", "false friends", "nan", '"a" or "b"')),
        *(("none", text, value) for text, value in (("7", 7), ("1.5", 1.5), ("true", True), ('{"a": 1}', {"a": 1}))),
        *(("any", text, value) for text, value in (("[1, 2]", [1, 2]), ("00", "00"), ("null", None))),
        *(("maybe", text, value) for text, value in (("null", None), ("nothing", "nothing"), ("12", "12"))),
        *(("count", text, value) for text, value in (("12", 12), ("-3", -3), ("2.0", 2), ("twelve", "twelve"))),
        *(("share", text, value) for text, value in (("1.10", 1.1), ("2", 2), ("Infinity", "Infinity"))),
        *(("yes", text, value) for text, value in (("true", True), ("False", False), ("yes", "yes"))),
        *(("items", text, value) for text, value in (('["a"]', ["a"]), ("a, b", "a, b"))),
        ("place", '{"city": "Delft"}', {"city": "Delft"}),
        ("unit", "1", "1"),
    ],
)
def test_arguments_without_quotes_have_the_values_of_the_schema(name: str, text: str, value: Any) -> None:
    call = f"<tool_call>find\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    ((_, arguments),) = read(call)
    assert repr(arguments[name]) == repr(value)
