"""Finds the tool call in a response, in the formats of the models that headrace trains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from headrace.hooks.kit.completion import Completion


class ToolCall(dict[str, Any]):
    """`{"name": …, "arguments": {…}}`, also as attributes."""

    @property
    def name(self) -> str:
        return str(self["name"])

    @property
    def arguments(self) -> dict[str, Any]:
        """By the parameters' names."""
        found: dict[str, Any] = self["arguments"]
        return found


def extract_tool_call(response: str) -> ToolCall | None:
    """Returns the first well-formed call of a response, or None: Qwen and Hermes, GLM, DeepSeek, Llama 3, Mistral."""
    text = response.raw if isinstance(response, Completion) else response
    for read in _FORMATS:
        if (call := read(text)) is not None:
            return call
    return None


def _tagged_json(text: str) -> ToolCall | None:
    """Qwen and Hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    return _first(re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.S))


def _key_values(text: str) -> ToolCall | None:
    """GLM: `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> </tool_call>`."""
    found = re.search(r"<tool_call>\s*([\w.\-]+)\s*(<arg_key>.*?)?</tool_call>", text, re.S)
    if found is None:
        return None
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", found[2] or "", re.S)
    return ToolCall(name=found[1], arguments={key.strip(): _value(value.strip()) for key, value in pairs})


def _deepseek(text: str) -> ToolCall | None:
    """DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`; V3 and R1 write `function` first."""
    found = re.search(
        r"<｜tool▁call▁begin｜>(?:function)?(?:<｜tool▁sep｜>)?\s*([\w.\-]+)(.*?)<｜tool▁call▁end｜>", text, re.S
    )
    arguments = _json(re.sub(r"^\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?|```\s*$", "", found[2])) if found else None
    return ToolCall(name=found[1], arguments=arguments) if found and isinstance(arguments, dict) else None


def _mistral(text: str) -> ToolCall | None:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]`."""
    _, found, behind = text.partition("[TOOL_CALLS]")
    return _first([behind]) if found else None


def _llama(text: str) -> ToolCall | None:
    """Llama 3: the whole response is `{"name": …, "parameters": …}`, also behind `<|python_tag|>`."""
    bare = re.sub(r"<\|(?:python_tag|eot_id|eom_id)\|>", "", text).strip()
    return _first([bare]) if bare.startswith("{") else None


_FORMATS: tuple[Callable[[str], ToolCall | None], ...] = (_tagged_json, _key_values, _deepseek, _mistral, _llama)


def _first(texts: list[str]) -> ToolCall | None:
    for text in texts:
        found = _json(text)
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, dict) and isinstance(found.get("name"), str):
            arguments = found.get("arguments", found.get("parameters", {}))
            arguments = _json(arguments) if isinstance(arguments, str) else arguments
            if isinstance(arguments, dict):
                return ToolCall(name=found["name"], arguments=arguments)
    return None


def _value(text: str) -> Any:
    found = _json(text)
    return text if found is None else found


def _json(text: str) -> Any:
    """Returns the first JSON value of the text, or None."""
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return None
