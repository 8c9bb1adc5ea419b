"""SGLang's own parsers of tool calls, by the name that `--sglang-tool-call-parser` has.

They come with all of SGLang: five seconds and half a gigabyte for each process that uses one. So only a job that names
one pays that; what has no name is read by `headrace.hooks.kit.tool_call`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from headrace.errors import ConfigError
from headrace.hooks.kit.argument import json_at
from headrace.limits import did_you_mean

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
