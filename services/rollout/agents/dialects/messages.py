"""Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from headrace.errors import InvalidArgument
from services.rollout.agents.dialects.core import (
    Asked,
    Call,
    Constraint,
    Dialect,
    Kept,
    Reply,
    Settings,
    TemplateMessage,
    assistant_message,
    parsed,
    refuse,
    said_since,
    sign,
    signed,
    sse,
    template_call,
)

_WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "cache_control"})
_DEFAULTS: Mapping[str, Sequence[Any]] = {
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_OF_TOOL = frozenset(
    {"name", "description", "input_schema", "type", "cache_control", "strict", "eager_input_streaming"}
)
"""`strict` is a wish: arguments are given as they were sampled."""
_CALLED = {"max_new_tokens": "max_tokens"}
_SEND_TEXT = "send text"
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; the others are `invalid_request_error`."""

Block = dict[str, Any]


class _Message(msgspec.Struct):
    role: str
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content


class _Request(msgspec.Struct, kw_only=True):
    """`POST /v1/messages`, and of `count_tokens`."""

    messages: list[_Message]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """The older place of `output_config.format`."""

    def asked(self) -> Asked:
        """Raises InvalidArgument, which names the parameter."""
        values = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or None,
        }
        thinks, effort = self._thinks(), (self.output_config or {}).get("effort")
        hints = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        asked = Asked(
            Settings(values, tuple(self.stop_sequences or ()), constraints=self._constraints(), called=_CALLED),
            list(self._template_messages()),
            tools=self._tools(),
            hints=hints if effort is None else {**hints, "reasoning_effort": effort},
            stream=bool(self.stream),
            splits_thoughts=True,
            without_thoughts=thinks is False,
        )
        asked.check()
        return asked

    def _thinks(self) -> bool | None:
        match (self.thinking or {}).get("type"):
            case None:
                return None
            case "enabled" | "adaptive":
                return True
            case "disabled":
                return False
        raise InvalidArgument("thinking.type must be enabled, adaptive or disabled", field="thinking.type")

    def _constraints(self) -> list[Constraint]:
        config = dict(self.output_config or {})
        config.pop("effort", None)
        forms = {"output_config.format": config.pop("format", None), "output_format": self.output_format}
        for name in config:
            refuse(f"output_config.{name[:80]}", "leave it out")
        for field, form in forms.items():
            if form is not None and form.get("type") != "json_schema":
                raise InvalidArgument(f"{field}.type must be json_schema", field=field)
        return [
            Constraint(field, "json_schema", json.dumps(form.get("schema"), separators=(",", ":")))
            for field, form in forms.items()
            if form is not None
        ]

    def _tools(self) -> list[Any] | None:
        choice = self.tool_choice or {"type": "auto"}
        if choice.get("disable_parallel_tool_use"):
            refuse("tool_choice.disable_parallel_tool_use", "a response may call several tools")
        if (kind := choice.get("type")) not in ("auto", "none"):
            refuse(f"tool_choice of type {kind!r:.40}", "a response is sampled freely, so write auto or none")
        tools = [_tool(tool) for tool in self.tools or ()]
        return None if kind == "none" else tools or None

    def _template_messages(self) -> Iterator[TemplateMessage]:
        if self.system:
            blocks = [{"type": "text", "text": self.system}] if isinstance(self.system, str) else self.system
            yield {"role": "system", "content": _text_of(blocks, "system")}
        called = dict[str, str]()
        role = ""
        for role, messages in groupby(self.messages, lambda message: message.role):
            blocks = [block for message in messages for block in message.blocks]
            match role:
                case "user":
                    yield from _of_user(blocks, called)
                case "assistant":
                    yield _of_assistant(blocks, called)
                case "system":
                    yield {"role": "system", "content": _text_of(blocks, "messages")}
                case _:
                    refuse(f"messages: role {role!r:.40}", "write user, assistant or system")
        if role == "assistant":
            raise InvalidArgument(
                "messages: the last one is the assistant's: a response that is begun (prefill) is not supported",
                field="messages",
            )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    name = str(tool.get("name"))[:80]
    if (kind := tool.get("type")) not in (None, "custom"):
        refuse(f"tools: {name} of type {kind!r:.40}", "describe it by an input_schema")
    for field in tool.keys() - _OF_TOOL:
        if tool[field] and tool[field] != ["direct"]:
            refuse(f"tools: {field[:80]} of {name}", "leave it out")
    described = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**described, "parameters": tool.get("input_schema", {})}}


def _text_of(blocks: Sequence[Block], where: str) -> str:
    """Blocks of text, each a paragraph of its own. Raises InvalidArgument for others."""
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            refuse(f"{where}: a block of type {block.get('type')!r:.40}", _SEND_TEXT)
    return "\n\n".join(block["text"] for block in blocks)


def _of_user(blocks: Sequence[Block], called: Mapping[str, str]) -> Iterator[TemplateMessage]:
    """Results of tools are messages of their own."""
    for is_result, group in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if is_result:
            yield from (_of_result(block, called) for block in group)
        else:
            yield {"role": "user", "content": _text_of(list(group), "messages")}


def _of_result(block: Block, called: Mapping[str, str]) -> TemplateMessage:
    call_id, content = str(block.get("tool_use_id")), block.get("content") or ""
    if call_id not in called:
        raise InvalidArgument(
            f"messages: tool_result of tool_use_id {call_id!r:.80}, which no tool_use before it has", field="messages"
        )
    text = content if isinstance(content, str) else _text_of(content, "tool_result")
    text = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": called[call_id]}


def _of_assistant(blocks: Sequence[Block], called: dict[str, str]) -> TemplateMessage:
    thoughts, texts, calls = list[str](), list[str](), list[TemplateMessage]()
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(signed(thought, block.get("signature"), "messages: a thinking block"))
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                called[call_id] = name
                calls.append(template_call(call_id, name, arguments))
            case _:
                refuse(f"messages: an assistant's block of type {block.get('type')!r:.40}", "send text and tool_use")
    return assistant_message("\n".join(thoughts), "".join(texts), calls)


class _Exchange:
    """`POST /v1/messages`: a thought, the text before the first tool call, and the calls are blocks."""

    def __init__(self, request: _Request, model: str) -> None:
        self.asked = request.asked()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._blocks = 0
        self._open: str | None = None
        self._thought = self._text = ""
        self._omits = (request.thinking or {}).get("display") == "omitted"
        """Thoughts are not shown, and their signature brings them back."""

    def body(self, replies: Sequence[Reply], prompt_tokens: int) -> Mapping[str, Any]:
        (reply,) = replies
        return self._message(list(self._content(reply)), prompt_tokens, reply.num_tokens, **_ending(reply))

    def begin(self, prompt_tokens: int) -> bytes:
        message = self._message([], prompt_tokens, 0, stop_reason=None, stop_sequence=None)
        return _event("message_start", message=message)

    def progress(self, thought: str, text: str) -> bytes:
        events = b""
        new, self._thought = said_since(self._thought, thought), thought
        if new:
            events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            events += b"" if self._omits else self._delta("thinking_delta", thinking=new)
        if text.strip():  # clients refuse a text of blanks
            new, self._text = said_since(self._text, text), text
            events += self._begin({"type": "text", "text": ""}) + self._delta("text_delta", text=new) if new else b""
        return events

    def end(self, reply: Reply, prompt_tokens: int) -> bytes:
        events = self.progress(reply.thought, reply.text)
        for call in reply.calls:
            events += self._close() + self._begin({**_tool_use(call), "input": {}})
            events += self._delta("input_json_delta", partial_json=call.arguments)
        events += self._close()
        events += _event("message_delta", delta=_ending(reply), usage=_usage(prompt_tokens, reply.num_tokens))
        return events + _event("message_stop")

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse(error, "error")

    def _content(self, reply: Reply) -> Iterator[Block]:
        if thought := reply.thought:
            yield {
                "type": "thinking",
                "thinking": "" if self._omits else thought,
                "signature": sign(thought),
            }
        if reply.text:
            yield {"type": "text", "text": reply.text}
        for call in reply.calls:
            yield _tool_use(call)

    def _message(self, content: list[Block], prompt_tokens: int, tokens: int, **ending: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **ending, "usage": _usage(prompt_tokens, tokens)}

    def _begin(self, block: Block) -> bytes:
        """Begins a block, unless one of this type is open."""
        if self._open == block["type"]:
            return b""
        events = self._close()
        self._open = block["type"]
        return events + _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, kind: str, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta("signature_delta", signature=sign(self._thought)) if self._open == "thinking" else b""
        events = signed + _event("content_block_stop", index=self._blocks)
        self._open = None
        self._blocks += 1
        return events


def _tool_use(call: Call) -> Block:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}


def _ending(reply: Reply) -> dict[str, Any]:
    reason = "max_tokens" if reply.is_truncated else "end_turn"
    if reply.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": "tool_use" if reply.calls else reason, "stop_sequence": reply.stop}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt_tokens, "output_tokens": tokens, **cached}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def error_body(status: int, kind: str, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in Anthropic's form. Clients that shorten their history look for the words of a prompt too long."""
    too_long = "prompt is too long: " if code == "context_length_exceeded" else ""
    error = {"type": _ERRORS.get(status, "invalid_request_error"), "message": f"{too_long}{message}"}
    return {"type": "error", "error": error}


def read_messages(body: bytes, model: str, kept: Kept | None = None) -> _Exchange:
    """Raises InvalidArgument."""
    return _Exchange(parsed(body, _Request, without_effect=_WITHOUT_EFFECT, asking_nothing=_DEFAULTS), model)


MESSAGES = Dialect(read_messages, error_body, versions=("anthropic-version", ("2023-06-01", "2026-10-21")))
