"""Renders conversations with a checkpoint's chat template, and refuses those of which the template drops a part.

A template is a program: it skips roles that it does not know, and text that it does not expect, without an error.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.errors import InvalidArgument

Messages = Sequence[Mapping[str, Any]]
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_IMAGE = "image"
_FIELD = "prompt.messages"
_USUAL = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    *,
    needs_calls: bool = False,
    first: int = 0,
) -> str:
    """Returns the conversation's text up to the policy's turn.

    `needs_calls`: tool calls must reach the text, too. Raises InvalidArgument when the template refuses the
    conversation, or leaves out the text of a message from the one at `first` on.
    """

    def render(rendered: Messages) -> str:
        found = tokenizer.apply_chat_template(
            list(rendered),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        return str(found)

    plain = for_template(tokenizer, messages)
    try:
        text = render(plain)
    except Exception as error:  # a template is code of the checkpoint's author: it may raise anything
        as_given = _with_given_arguments(plain, messages)
        if as_given == plain:
            raise refused(error) from error
        try:
            text, plain = render(as_given), as_given
        except Exception:  # noqa: BLE001  # the first error is of the form that most templates take
            raise refused(error) from error
    require_written(plain, render, needs_calls=needs_calls, first=first)
    return text


def refused(error: Exception) -> InvalidArgument:
    """What a caller is told when the template raised `error`."""
    return InvalidArgument(f"the chat template refused the conversation: {error}", field=_FIELD)


def for_template(tokenizer: Any, messages: Messages) -> list[dict[str, Any]]:
    """Returns messages in the form that templates take: content as one text, arguments of tool calls as objects.

    Content with images stays a list of parts. Raises InvalidArgument for other content, naming the message.
    """
    source = str(tokenizer.chat_template)
    return [_plain(number, message, source) for number, message in enumerate(messages)]


def require_written(
    messages: Messages, render: Callable[[Messages], str], *, needs_calls: bool = False, first: int = 0
) -> None:
    """Raises InvalidArgument unless the text of every message from `first` on reaches the rendered text.

    The conversation is rendered once more with a random word in place of each text. So a text that is left out is
    noticed even where another message says the same.
    """
    nonce = secrets.token_hex(8)
    probes = [_probe(f"{nonce}m{number}m", message) for number, message in enumerate(messages)]
    try:
        text = render(probes)
    except Exception:  # noqa: BLE001  # a template may want a certain text, and it has written the real one
        return
    written = {int(number) for number in re.findall(f"{nonce}m(\\d+)m", text)}
    called = {int(number) for number in re.findall(f"{nonce}m(\\d+)mcall", text)}
    for number, message in enumerate(messages[first:], first):
        role = message.get("role")
        if number not in written and _has_text(message.get("content")):
            raise InvalidArgument(
                f"the chat template writes nothing of message {number}, whose role is {role!r:.80}: {_advice(role)}",
                field=_FIELD,
            )
        if needs_calls and message.get("tool_calls") and number not in called:
            raise InvalidArgument(
                f"the chat template writes nothing of the tool calls of message {number}: write them into its content, "
                "or use a model whose chat template knows tools",
                field=_FIELD,
            )


def _advice(role: Any) -> str:
    if (usual := _USUAL.get(role)) is not None:
        return f"rename the role to {usual!r}"
    if role in ("system", "user", "assistant", "tool"):
        return "join its text with the message before or after it, or use a model whose chat template writes both"
    return "use one of the roles that it knows, usually system, user, assistant and tool"


def _plain(number: int, message: Mapping[str, Any], source: str) -> dict[str, Any]:
    made = {**message, "content": _content(number, message.get("content"))}
    if message.get("role") == "developer" and "developer" not in source:
        made["role"] = "system"  # OpenAI's newer name
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    return made


def _content(number: int, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(
            f"the content of message {number} is a {type(content).__name__}: write text, or an array of parts such as "
            '{"type": "text", "text": "…"}',
            field=_FIELD,
        )
    parts = [_part(number, part) for part in content]
    if any(part["type"] == _IMAGE for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(number: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping):
        if kind == _IMAGE:
            return dict(part)
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
    raise InvalidArgument(
        f'message {number} has a part of type {kind!r:.40} without text: write parts such as {{"type": "text", "text": '
        '"…"}',
        field=_FIELD,
    )


def _call(call: Any) -> Any:
    """Templates write arguments as JSON themselves: text that is JSON already would be quoted once more."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function)}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": found} if isinstance(found, dict) else call


def _with_given_arguments(plain: Messages, given: Messages) -> list[dict[str, Any]]:
    """A few templates take arguments as text alone: DeepSeek R1's."""
    return [
        {**message, "tool_calls": original["tool_calls"]} if "tool_calls" in message else dict(message)
        for message, original in zip(plain, given, strict=True)
    ]


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(_has_text(part.get("text")) for part in content)
    return isinstance(content, str) and bool(content.strip())


def _probe(mark: str, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    probe = dict(message)
    if isinstance(content, list):
        probe["content"] = [{**part, "text": mark} if _has_text(part.get("text")) else part for part in content]
    elif _has_text(content):
        probe["content"] = mark
    if isinstance(calls := message.get("tool_calls"), list):
        probe["tool_calls"] = [_named(call, f"{mark}call") for call in calls]
    return probe


def _named(call: Any, name: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
