"""Finds the tool calls in a response, in the formats of the models that headrace trains.

A response is read from left to right: thoughts are skipped, a call ends where its JSON ends, and a malformed call costs
nothing but itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.errors import ConfigError
from headrace.limits import did_you_mean
from headrace.session import Completion

_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_SECTIONS = ("<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>")
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_DEEPSEEK, _DEEPSEEK_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_KIMI, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_MISTRAL = "[TOOL_CALLS]"
_LLAMA = "<|python_tag|>"
_OF_CALL = frozenset({"name", "arguments", "parameters", "id", "type"})

_BLANK = re.compile(r"\s*")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")
_SPECIAL = re.compile(r"(?:\s|<\|[^<>|]*\|>|<｜[^<>｜]*｜>)*\Z")
_NAME = re.compile(r"[\w.\-]+")
_GLM_BETWEEN = re.compile(r"(?:\\n|\s)*")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>(?:\\n|\s)*<arg_value>(.*?)</arg_value>", re.S)
_DEEPSEEK_NAME = re.compile(
    rf"\s*(?:function{_DEEPSEEK_SEPARATOR}\s*)?([\w.\-]+)\s*(?:{_DEEPSEEK_SEPARATOR})?\s*(?:```json)?\s*(?=\{{)"
)
_KIMI_NAME = re.compile(rf"\s*(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*{re.escape(_KIMI_ARGUMENTS)}\s*")
_MISTRAL_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

Read = tuple[list["ToolCall"], int]
"""The calls behind an opening mark, and where they end."""


class ToolCall(dict[str, Any]):
    """`{"name": …, "arguments": {…}}`, also as attributes."""

    @property
    def name(self) -> str:
        return str(self["name"])

    @property
    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = self["arguments"]
        return found


@dataclass(frozen=True, slots=True)
class SplitResponse:
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

    Calls that the policy only thinks about are left out. With `tools`, so are calls of other tools, and GLM's
    arguments, which are no JSON, get the types of the tool's schema.

    `parser` is one of SGLang's by its name, as `--sglang-tool-call-parser` takes it; a response of `generate_single`
    or `chat` brings the job's. Raises ConfigError for a parser that there is not.
    """
    return list(divided_response(response, parser=parser, tools=tools).calls)


def divided_response(
    response: str, *, parser: str | None = None, tools: Sequence[Any] | None = None, only_offered: bool = True
) -> SplitResponse:
    """Divides a text, or a Completion with its special tokens, before its first call."""
    if not isinstance(response, Completion):
        return divided(response, parser=parser, tools=tools, only_offered=only_offered)
    return divided(
        response.raw,
        parser=parser or response.parser,
        tools=tools,
        in_thought=response.in_thought,
        only_offered=only_offered,
    )


def divided(
    text: str,
    *,
    parser: str | None = None,
    tools: Sequence[Any] | None = None,
    in_thought: bool = False,
    only_offered: bool = True,
) -> SplitResponse:
    """Divides a response's text with special tokens before its first call.

    `in_thought`: the prompt has opened a thought. With `only_offered`, calls of other tools than `tools` are none.
    """
    reader = _Reader(text, _schemas(tools or ()), only_offered=bool(tools) and only_offered)
    calls, start, spoken = reader.read(in_thought=in_thought)
    if parser is not None:
        before, found = read_by(parser, text[spoken:], tools or ())
        return divided_by(text, text[:spoken] + before, found, tools)
    return SplitResponse(text[:start], text[start:], calls) if calls else SplitResponse(text)


def spoken_from(text: str, *, in_thought: bool) -> int:
    """Returns where the response's last thought has ended."""
    return _Reader(text, {}, only_offered=False).read(in_thought=in_thought)[2]


def divided_by(
    text: str, before: str, found: Sequence[tuple[str, dict[str, Any]]], tools: Sequence[Any] | None
) -> SplitResponse:
    """The same of what a parser has found: the text before the calls, their names and arguments."""
    offered = _schemas(tools or ())
    calls = [ToolCall(name=name, arguments=arguments) for name, arguments in found if not tools or name in offered]
    return SplitResponse(before, text[len(before) :], calls) if calls else SplitResponse(text)


def opens_thought(prompt: str) -> bool:
    """True for a rendered prompt behind which the policy begins in the midst of a thought."""
    return bool(opened_thought(prompt))


def opened_thought(prompt: str) -> str:
    """Returns the end of a rendered prompt that opens a thought, from its mark on; empty where it opens none."""
    text = prompt.rstrip()
    mark = next((mark for mark in _THOUGHTS if text.endswith(mark)), None)
    return prompt[len(text) - len(mark) :] if mark else ""


def divided_thought(text: str, *, in_thought: bool, is_partial: bool = False) -> tuple[str, str]:
    """(the thought that a response begins with, what it says behind it); `in_thought`: the prompt has opened it.

    Of a response that is written yet (`is_partial`), what the next tokens may turn into a mark is left out.
    """
    begins = text.lstrip()
    opening = next((mark for mark in _THOUGHTS if begins.startswith(mark)), None)
    if opening is None and not in_thought:
        may_open = is_partial and any(mark.startswith(begins) for mark in _THOUGHTS)
        return "", "" if may_open else text
    inner = begins.removeprefix(opening or "")
    closings = [_THOUGHTS[opening]] if opening else list(_THOUGHTS.values())
    ends = [(position, mark) for mark in closings if (position := inner.find(mark)) >= 0]
    if ends:
        position, mark = min(ends)
        return inner[:position].strip(), inner[position + len(mark) :].lstrip()
    if is_partial:
        cut = max((k for mark in closings for k in range(1, len(mark)) if inner.endswith(mark[:k])), default=0)
        inner = inner[: len(inner) - cut]
    return inner.strip(), ""


def _schemas(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's parameters, by the tool's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found


class _Reader:
    """Reads one text."""

    def __init__(self, text: str, offered: Mapping[str, Mapping[str, Any]], *, only_offered: bool) -> None:
        self._text = text
        self._offered = offered
        self._only_offered = only_offered
        self._formats: Mapping[str, Callable[[int], Read | None]] = {
            _TOOL_CALL: self._tagged,
            _DEEPSEEK: self._deepseek,
            _KIMI: self._kimi,
            _MISTRAL: self._mistral,
            _LLAMA: self._bare,
        }
        marks = (*_THOUGHTS, *_THOUGHTS.values(), *_SECTIONS, *self._formats)
        self._marks = re.compile("|".join(map(re.escape, marks)))

    def read(self, *, in_thought: bool) -> tuple[list[ToolCall], int, int]:
        """Returns the calls, where the first of them begins, and where the last thought has ended."""
        calls, start, section, position = list[ToolCall](), 0, -1, 0
        if in_thought:
            position = min(self._after(mark, 0) for mark in _THOUGHTS.values())
        spoken = position
        while mark := self._marks.search(self._text, position):
            name, position = mark.group(), mark.end()
            if name in _THOUGHTS:
                spoken = position = self._after(_THOUGHTS[name], position)
            elif name in _THOUGHTS.values():  # the prompt has opened this thought: all of it was one
                calls, spoken = [], position
            elif name in _SECTIONS:
                section = mark.start()
            elif found := self._formats[name](position):
                made = [call for call in found[0] if not self._only_offered or call.name in self._offered]
                if made and not calls:
                    start = section if section >= 0 else mark.start()
                calls += made
                position = found[1]
                continue
            if name not in _SECTIONS:
                section = -1
        if not calls and (bare := self._bare_text(spoken)):
            return bare, spoken, spoken
        return calls, start, spoken

    def _after(self, mark: str, position: int) -> int:
        """Behind the next such mark; a thought that does not end is all that is left."""
        found = self._text.find(mark, position)
        return len(self._text) if found < 0 else found + len(mark)

    def _tagged(self, position: int) -> Read | None:
        """Qwen and Hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>`; GLM writes no JSON in the tag."""
        position = _end(_BLANK, self._text, position)
        if self._text[position : position + 1] in ("{", "["):
            return self._objects(position)
        return self._key_values(position)

    def _objects(self, position: int, *, are_bare: bool = False) -> Read | None:
        """JSON objects, and arrays of them, one behind the other. None where the first is malformed."""
        calls, end = list[ToolCall](), None
        while self._text[position : position + 1] in ("{", "["):
            value, position = json_at(self._text, position)
            if position < 0:
                break
            end = position
            for item in value if isinstance(value, list) else [value]:
                if (call := _of_json(item)) and (not are_bare or self._is_bare_call(item)):
                    calls.append(call)
                elif are_bare:
                    return None
            position = _end(_BETWEEN_CALLS, self._text, position)
        return None if end is None else (calls, end)

    def _is_bare_call(self, item: Mapping[str, Any]) -> bool:
        """An object without a mark before it is an answer, unless it has a call's keys and the name of a tool."""
        if self._offered:
            return item["name"] in self._offered and set(item) <= _OF_CALL
        return "arguments" in item or "parameters" in item

    def _key_values(self, position: int) -> Read | None:
        """GLM: `<tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> </tool_call>`."""
        if not (name := _NAME.match(self._text, position)):
            return None
        called, arguments = name.group(), dict[str, Any]()
        schema = self._offered.get(called, {})
        end = position = _end(_GLM_BETWEEN, self._text, name.end())
        while pair := _GLM_PAIR.match(self._text, position):
            key = pair.group(1).strip()
            arguments[key] = argument_of(pair.group(2), schema, key)
            end, position = pair.end(), _end(_GLM_BETWEEN, self._text, pair.end())
        if self._text.startswith("<arg_key>", position):
            return None  # an argument without its end
        is_closed = bool(arguments) or self._text.startswith(_TOOL_CALL_END, position)
        # A name alone without a closing tag may be prose.
        if not is_closed and not (called in self._offered and _SPECIAL.match(self._text, position)):
            return None
        return [ToolCall(name=called, arguments=arguments)], end

    def _deepseek(self, position: int) -> Read | None:
        """DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`; V3 and R1 write `function` first."""
        found = _DEEPSEEK_NAME.match(self._text, position)
        return self._named(found.group(1), found.end()) if found else None

    def _kimi(self, position: int) -> Read | None:
        """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""
        found = _KIMI_NAME.match(self._text, position)
        return self._named(found.group(1), found.end()) if found else None

    def _mistral(self, position: int) -> Read | None:
        """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]`; later ones write `[TOOL_CALLS]name[ARGS]{…}`."""
        if found := _MISTRAL_NAME.match(self._text, position):
            return self._named(found.group(1), found.end())
        return self._objects(_end(_BLANK, self._text, position))

    def _named(self, name: str, position: int) -> Read | None:
        value, end = json_at(self._text, position)
        return ([ToolCall(name=name, arguments=value)], end) if isinstance(value, dict) else None

    def _bare(self, position: int) -> Read | None:
        """Llama 3 behind `<|python_tag|>`: `{"name": …, "parameters": …}; {…}`."""
        return self._objects(_end(_BLANK, self._text, position))

    def _bare_text(self, position: int) -> list[ToolCall]:
        """Llama 3 without a mark: nothing but calls is written."""
        found = self._objects(_end(_BLANK, self._text, position), are_bare=True)
        if found is None or not _SPECIAL.match(self._text, _end(_BETWEEN_CALLS, self._text, found[1])):
            return []
        return [call for call in found[0] if not self._only_offered or call.name in self._offered]


def _of_json(item: Any) -> ToolCall | None:
    if not isinstance(item, dict) or not isinstance(name := item.get("name"), str) or not name:
        return None
    arguments = next((item[key] for key in ("arguments", "parameters") if item.get(key) is not None), None)
    if isinstance(arguments, str):
        text = arguments.strip()
        arguments, end = json_at(text or "{}", 0)
        if end != len(text or "{}"):
            return None
    arguments = {} if arguments is None else arguments
    return ToolCall(name=name, arguments=arguments) if isinstance(arguments, dict) else None


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    return found.end() if found else position


# Values of tool arguments that a format writes without JSON's quotes, as GLM does.


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "array": list,
    "null": type(None),
}
_MOST_REFERENCES = 8


def argument_of(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """Returns the value that `text` is for the parameter `name` of a tool with the JSON schema `parameters`.

    A parameter of text gets the text. Without a schema a text is a value only where JSON would write the value so:
    `0042`, `1.10` and `2031-05-17` stay text.
    """
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = set(_kinds(schema, parameters, _MOST_REFERENCES)) if isinstance(schema, Mapping) else set()
    value = _json(text.strip())
    if isinstance(value, str):
        return text if value == text.strip() else value  # a text in JSON's quotes
    if not kinds:
        return text if value is _NONE or not _is_written_so(value, text.strip()) else value
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if kind in kinds and _is_of(value, kind) and ("string" not in kinds or _is_written_so(value, text.strip())):
            return value
    if "string" not in kinds and "boolean" in kinds and text.strip() in ("True", "False"):
        return text.strip() == "True"
    if "string" not in kinds and "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


_NONE = object()


def json_at(text: str, position: int) -> tuple[Any, int]:
    """Returns the JSON value that begins there, and its end; (None, -1) where none is well-formed.

    JSON has no NaN and no infinity: they stay the text that the policy wrote, as in the JSON of protocol buffers.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None, -1


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


_DECODER = json.JSONDecoder(strict=False, parse_constant=str, parse_float=_number)


def _json(text: str) -> Any:
    """The value of the whole text, or _NONE."""
    value, end = json_at(text, 0)
    return value if end == len(text) else _NONE


def _is_written_so(value: Any, text: str) -> bool:
    """False for numbers that lose digits or zeros."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value) == text
    return value is not _NONE


def _is_of(value: Any, kind: str) -> bool:
    if value is _NONE or (isinstance(value, bool) and kind != "boolean"):
        return False
    return isinstance(value, _KINDS[kind])


def _kinds(schema: Mapping[str, Any], root: Mapping[str, Any], most: int) -> Iterator[str]:
    """Yields JSON's names of the types that the schema allows; none where it allows all."""
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else [each for each in kind or () if isinstance(each, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    for value in [*values, *([schema["const"]] if "const" in schema else [])]:
        yield next((name for name, of in _KINDS.items() if isinstance(value, of)), "string")
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            if isinstance(part, Mapping) and most:
                yield from _kinds(part, root, most - 1)
    if isinstance(reference := schema.get("$ref"), str) and most:
        for folder in ("$defs", "definitions"):
            defined = root.get(folder)
            part = defined.get(reference.rpartition("/")[2]) if isinstance(defined, Mapping) else None
            if isinstance(part, Mapping):
                yield from _kinds(part, root, most - 1)


# SGLang's own parsers of tool calls, by the name that `--sglang-tool-call-parser` has. They come with all of SGLang:
# five seconds and half a gigabyte for each process that uses one. So only a job that names one pays that.


_AUTO = "auto"
_NEEDS_A_TOKENIZER = "response_template"


def tool_call_parser(args: Mapping[str, Any]) -> str | None:
    """The parser that a job's args name; None for SGLang's `auto`, which headrace's own reading stands for."""
    name = args.get("sglang_tool_call_parser")
    return None if name is None or name == _AUTO else str(name)


def load_parser(name: str) -> None:
    """Imports SGLang, which takes seconds. Raises ConfigError unless it has a parser of that name."""
    _detector(name)


def read_by(name: str, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Returns what of the text stands before the calls, and name and arguments of each call.

    Calls of other tools than `tools` are among them. Raises ConfigError as `load_parser` does.
    """
    detector = _detector(name)()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.environ import envs

    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        found = _found(detector, text, [Tool.model_validate(tool) for tool in tools])
    if found is None:
        return text, []
    calls = [(call.name, _arguments(call.parameters)) for call in found.calls]
    return _before(text, found.normal_text), [
        (called, arguments) for called, arguments in calls if called and arguments is not None
    ]


def _found(detector: Any, text: str, tools: Sequence[Any]) -> Any | None:
    try:
        return detector.detect_and_parse(text, tools)
    except Exception:  # noqa: BLE001  # what a policy writes may break any parser: then it calls nothing
        return None


@cache
def _detector(name: str) -> Any:
    try:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise ConfigError(
            f"the tool call parser {name} is one of SGLang's, which cannot be imported here ({error}): leave "
            "--sglang-tool-call-parser out, and headrace reads the calls itself",
            field="sglang.tool_call_parser",
        ) from error
    known = {key: one for key, one in FunctionCallParser.ToolCallParserEnum.items() if key != _NEEDS_A_TOKENIZER}
    if name not in known:
        raise ConfigError(
            f"SGLang has no tool call parser {name!r} (it has {', '.join(sorted(known))}){did_you_mean(name, known)}",
            field="sglang.tool_call_parser",
        )
    return known[name]


def _before(text: str, normal: str) -> str:
    """Parsers strip the text that they leave: what stands before the calls is given as it was sampled."""
    blank = len(text) - len(text.lstrip())
    pairs = zip(text[blank:], normal.lstrip(), strict=False)
    size = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    size = min(len(text) - blank, len(normal.lstrip())) if size is None else size
    return text[: blank + size] if size else ""


def _arguments(written: str) -> dict[str, Any] | None:
    text = written.strip() or "{}"
    found, end = json_at(text, 0)
    return found if isinstance(found, dict) and end == len(text) else None
