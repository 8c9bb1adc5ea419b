"""Tool calls as SGLang's own parsers read them, beside headrace's reading of the same texts.

They are imported in a process of their own: SGLang is half a gigabyte.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.hooks import HookArgs
from headrace.hooks.kit import extract_tool_calls
from headrace.hooks.kit.tool_call import divided, load_parser, tool_call_parser
from headrace.process.workers import WorkerRaised
from services.rollout.agents.tool_calls import ToolCallReader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ARGUMENTS = '{"a": 3, "b": "4"}'
TWO = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
BOTH = {
    "qwen": f"I add.\n{TWO}\n{TWO}",
    "hermes": f"<think>Perhaps {TWO}?</think>\n{TWO}",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>4</arg_value>\n</tool_call>",
    "deepseekv3": f"So:{CALLS_BEGIN}function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```{CALLS_END}",
    "deepseekv31": f"{CALLS_BEGIN}add<｜tool▁sep｜>{ARGUMENTS}{CALLS_END}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3": f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]',
}
"""Texts in formats that both know, by the parser's name."""
OTHERS = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "</function>\n</tool_call>",
    "pythonic": '[add(a=3, b="4")]',
}
"""Formats that SGLang alone knows."""
NONE = [
    ("qwen", "The answer is 7."),
    ("qwen", "<tool_call>{not json}</tool_call>"),
    ("llama3", '{"a": 3}'),
    ("glm", ""),
]
UNKNOWN = ("qwen", '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>')
"""A tool that was not offered: no call."""


def read_all(texts: list[list[str]], tools: list[dict[str, Any]]) -> list[list[Any]]:
    """Runs in a worker: (before, rest, calls) of each text by its parser."""
    found = []
    for parser, text in texts:
        part = divided(text, parser=parser, tools=tools)
        assert list(part.calls) == extract_tool_calls(text, parser=parser, tools=tools)
        found.append([part.before, part.rest, [dict(call) for call in part.calls]])
    return found


async def test_the_endpoint_and_hooks_read_calls_with_sglangs_parser_in_a_worker() -> None:
    reader = ToolCallReader("qwen3_coder")
    try:
        await reader.start()
        before, rest, (call,) = await reader.read(f"So: {OTHERS['qwen3_coder']}", TOOLS)
        assert (before, rest) == ("So: ", OTHERS["qwen3_coder"])
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3, "b": "4"})
        assert await reader.read("The answer is 7.", TOOLS) == ("The answer is 7.", "", [])
        assert reader._pool is not None
        with pytest.raises(WorkerRaised, match="did you mean qwen3_coder"):
            await reader._pool.run(load_parser, "qwen3-coder", timeout_seconds=60.0)
        pairs = [*BOTH.items(), *OTHERS.items(), *NONE, UNKNOWN]
        read = await reader._pool.run(read_all, pairs, TOOLS, timeout_seconds=60.0)
    finally:
        await reader.close()
    require_the_same(dict(zip(pairs, read, strict=True)))


def require_the_same(found: dict[tuple[str, str], Any]) -> None:
    """What SGLang's parsers find is what headrace finds, where both know the format."""
    for parser, text in BOTH.items():
        ours = divided(text, tools=TOOLS)
        before, rest, calls = found[parser, text]
        assert calls == list(ours.calls), parser
        assert calls[0] == {"name": "add", "arguments": {"a": 3, "b": "4"}}, parser
        assert before + rest == text
        assert before.strip() == ours.before.strip()
    for pair in OTHERS.items():
        assert found[pair][2] == [{"name": "add", "arguments": {"a": 3, "b": "4"}}], pair
    for pair in NONE:
        assert found[pair] == [pair[1], "", []]
        assert not divided(pair[1], tools=TOOLS).calls
    assert found[UNKNOWN][2] == list(divided(UNKNOWN[1], tools=TOOLS).calls) == []


def test_a_job_that_names_no_parser_does_without_sglang() -> None:
    assert tool_call_parser(HookArgs({})) is None
    assert tool_call_parser(HookArgs({"sglang_tool_call_parser": "auto"})) is None
    assert tool_call_parser(HookArgs({"sglang_tool_call_parser": "qwen3_coder"})) == "qwen3_coder"
