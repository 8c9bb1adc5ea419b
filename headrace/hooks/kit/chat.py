"""`chat`: the policy's next message in a conversation, its tool calls parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.hooks.kit.call import current_call
from headrace.hooks.kit.completion import Completion
from headrace.hooks.kit.generate import generate_single
from headrace.hooks.kit.template import template_of
from headrace.hooks.kit.tool_call import ToolCall, divided_response

Messages = Sequence[Mapping[str, Any]]


class AssistantMessage(dict[str, Any]):
    """`{"role": "assistant", "content": …}`, with `tool_calls` where tools were called: append it to the messages."""

    @property
    def content(self) -> Completion:
        """The text before the first tool call. Its tokens are those of the whole response."""
        content: Completion = self["content"]
        return content

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls by name and arguments; in the message they have the form that chat templates take."""
        return [ToolCall(call["function"]) for call in self.get("tool_calls", ())]


async def chat(
    messages: Messages, tools: Sequence[Any] | None = None, sampling_params: Mapping[str, Any] | None = None
) -> AssistantMessage:
    """Returns the policy's next message. Call it from a generate function; limits and errors are `generate_single`'s.

    Appended to the messages as it is, it is continued by its tokens. Tool calls are parsed where tools were offered:
    `tools`, by default those of the prompt's row. The response is empty once a limit leaves no room.
    """
    call = current_call()
    response = await generate_single(messages, tools=tools, sampling_params=sampling_params)
    offered = tools if tools is not None else call.tools
    said, tool_calls = str(response), list[dict[str, Any]]()
    if offered and (found := divided_response(response, tools=offered)).calls:
        said = template_of(call.args).without_special(found.before)
        tool_calls = _in_message(found.calls, sum(len(message.get("tool_calls") or ()) for message in messages))
    content = response.as_content(said, tool_calls)
    call.record(messages, content)
    return AssistantMessage(role="assistant", content=content, **({"tool_calls": tool_calls} if tool_calls else {}))


def _in_message(calls: Sequence[ToolCall], num_before: int) -> list[dict[str, Any]]:
    """OpenAI's form, but for the arguments, which chat templates take as an object."""
    return [
        {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(calls, start=num_before)
    ]
