"""Messages of OpenAI's chat protocol: as they come, and as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidArgument
from headrace.limits import MAX_MESSAGES, MAX_TOOLS, require_between


class Function(msgspec.Struct):
    """The function of a tool call; OpenAI writes its arguments as JSON in a string."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCallMessage(msgspec.Struct):
    """A call in an assistant's message."""

    function: Function
    id: str = ""
    type: str = "function"


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    """One message; fields that are not here are of no chat template."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    reasoning_content: str | None = None
    function_call: Any = None

    @property
    def text(self) -> str:
        """The content as one text. Raises InvalidArgument for parts that are no text."""
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise InvalidArgument(
                    f"content of type {part.type!r:.40} is not supported: send text", field="messages"
                )
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Returns what chat templates expect: content as text, and arguments as objects."""
        made: dict[str, Any] = {"role": self.role, "content": self.text}
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                made[field] = value
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in self.tool_calls
            ]
        return made


def require_few(messages: Sequence[Message], tools: Sequence[Any]) -> None:
    """Raises InvalidArgument, which names what a template would take too long to write."""
    require_between(len(messages), 1, MAX_MESSAGES, "messages")
    require_between(sum(len(message.tool_calls or ()) for message in messages), 0, MAX_MESSAGES, "tool_calls")
    require_between(len(tools), 0, MAX_TOOLS, "tools")


def _arguments(call: ToolCallMessage) -> Mapping[str, Any] | str:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
