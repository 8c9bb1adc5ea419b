"""Finds the tool calls in a response, in the formats of the models that headrace trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.hooks.kit.completion import Completion
from headrace.hooks.kit.sglang_parser import read_by

_MARKS = (
    "<tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
)


class ToolCall(dict[str, Any]):
    """`{"name": …, "arguments": {…}}`, also as attributes."""

    @property
    def name(self) -> str:
        return str(self["name"])

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments by parameter name."""
        found: dict[str, Any] = self["arguments"]
        return found


@dataclass(frozen=True, slots=True)
class Divided:
    """A response's text before its tool calls, the rest, and the calls in it; without calls there is no rest."""

    before: str
    rest: str = ""
    calls: Sequence[ToolCall] = ()


def extract_tool_call(
    response: str, *, parser: str | None = None, tools: Sequence[Any] | None = None
) -> ToolCall | None:
    """Returns the first well-formed call of a response, or None; `extract_tool_calls` has the formats."""
    return next(iter(extract_tool_calls(response, parser=parser, tools=tools)), None)


def extract_tool_calls(
    response: str, *, parser: str | None = None, tools: Sequence[Any] | None = None
) -> list[ToolCall]:
    """Returns the well-formed calls of a response: Qwen and Hermes, GLM, DeepSeek, Kimi K2, Mistral, Llama 3.

    `parser` is one of SGLang's by its name, as `--sglang-tool-call-parser` takes it; a response of `generate_single`
    or `chat` brings the job's. Some of SGLang's read the types of arguments in the `tools` that were offered.
    Raises ConfigError for a parser that there is not.
    """
    text, named = response, parser
    if isinstance(response, Completion):
        text, named = response.raw, parser or response.parser
    return list(divided(text, parser=named, tools=tools).calls)


def divided(text: str, *, parser: str | None = None, tools: Sequence[Any] | None = None) -> Divided:
    """Divides a response's text with special tokens before its first call."""
    if parser is not None:
        return divided_by(text, *read_by(parser, text, tools or ()))
    starts = [position for mark in _MARKS if (position := text.find(mark)) >= 0]
    if not starts and text.lstrip().startswith("{"):
        starts = [0]  # Llama 3 writes nothing but the call
    start = min(starts, default=len(text))
    calls = _read(text[start:])
    return Divided(text[:start], text[start:], calls) if calls else Divided(text)


def divided_by(text: str, before: str, found: Sequence[tuple[str, dict[str, Any]]]) -> Divided:
    """The same of what a parser has found: the text before the calls, their names and arguments."""
    calls = [ToolCall(name=name, arguments=arguments) for name, arguments in found]
    return Divided(before, text[len(before) :], calls) if calls else Divided(text)


def _read(text: str) -> list[ToolCall]:
    for read in _FORMATS:
        if calls := read(text):
            return calls
    return []


def _tagged_json(text: str) -> list[ToolCall]:
    """Qwen and Hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    return _of_json(re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.S))


def _key_values(text: str) -> list[ToolCall]:
    """GLM: `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> </tool_call>`."""
    calls = []
    for name, body in re.findall(r"<tool_call>\s*([\w.\-]+)\s*(<arg_key>.*?)?</tool_call>", text, re.S):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.S)
        calls.append(ToolCall(name=name, arguments={key.strip(): _value(value.strip()) for key, value in pairs}))
    return calls


def _deepseek(text: str) -> list[ToolCall]:
    """DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`; V3 and R1 write `function` first."""
    calls = []
    for name, body in re.findall(
        r"<｜tool▁call▁begin｜>(?:function)?(?:<｜tool▁sep｜>)?\s*([\w.\-]+)(.*?)<｜tool▁call▁end｜>", text, re.S
    ):
        arguments = _json(re.sub(r"^\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?|```\s*$", "", body))
        if isinstance(arguments, dict):
            calls.append(ToolCall(name=name, arguments=arguments))
    return calls


def _kimi(text: str) -> list[ToolCall]:
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""
    found = re.findall(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
        r"<\|tool_call_end\|>",
        text,
        re.S,
    )
    parsed = [(name, _json(body)) for name, body in found]
    return [ToolCall(name=name, arguments=body) for name, body in parsed if isinstance(body, dict)]


def _mistral(text: str) -> list[ToolCall]:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]`."""
    _, found, behind = text.partition("[TOOL_CALLS]")
    return _of_json([behind]) if found else []


def _llama(text: str) -> list[ToolCall]:
    """Llama 3: the whole response is `{"name": …, "parameters": …}`, also behind `<|python_tag|>`."""
    bare = re.sub(r"<\|(?:python_tag|eot_id|eom_id)\|>", "", text).strip()
    return _of_json([bare]) if bare.startswith("{") else []


_FORMATS: tuple[Callable[[str], list[ToolCall]], ...] = (
    *(_tagged_json, _key_values, _deepseek, _kimi, _mistral, _llama),
)


def _of_json(texts: list[str]) -> list[ToolCall]:
    """The calls of JSON objects, and of arrays of them; what is none is left out."""
    calls = []
    for text in texts:
        found = _json(text)
        for item in found if isinstance(found, list) else [found]:
            if isinstance(item, dict) and isinstance(item.get("name"), str):
                arguments = item.get("arguments", item.get("parameters", {}))
                arguments = _json(arguments) if isinstance(arguments, str) else arguments
                if isinstance(arguments, dict):
                    calls.append(ToolCall(name=item["name"], arguments=arguments))
    return calls


def _value(text: str) -> Any:
    found = _json(text)
    return text if found is None else found


def _json(text: str) -> Any:
    """Returns the first JSON value of the text, or None."""
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return None
