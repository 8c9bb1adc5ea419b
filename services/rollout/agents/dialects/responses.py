"""OpenAI's Responses API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidArgument
from headrace.hooks.kit.tool_call import divided_thought
from services.rollout.agents.dialects.chat import error_body, log_probs
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

_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "service_tier", "safety_identifier", "client_metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
_DEFAULTS: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "context_management": ([],),
}
_CALLED = {"max_new_tokens": "max_output_tokens"}
_INSTEAD = {
    "parallel_tool_calls": "a response may call several tools",
    "conversation": "name the previous_response_id",
    "top_logprobs": "logprobs are those of sampled tokens",
}
_ENCRYPTED, _LOG_PROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_PLAYED_ELSEWHERE = ("web_search", "web_search_preview")
"""Tools that Codex always offers and that OpenAI plays: the policy is not told of them."""
_TEXTS = ("input_text", "output_text", "text")
_SYSTEM = ("system", "developer")

Item = dict[str, Any]


class _Request(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[Item]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None

    def asked(self, response_id: str, kept: Kept | None) -> Asked:
        """Raises InvalidArgument, which names the parameter."""
        self._check_include()
        values = {"max_new_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        before, effort = self._before(kept), self._effort()
        conversation = [*before, *_template_messages(self._items(), before, kept or {})]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked = Asked(
            Settings(values, constraints=self._constraints(), called=_CALLED),
            _with_one_system([*system, *conversation]),
            tools=self._tools(),
            variables={} if effort in (None, "none") else {"reasoning_effort": effort},
            hints={"enable_thinking": False, "thinking": False} if effort == "none" else {},
            stream=bool(self.stream),
            splits_thoughts=True,
            without_thoughts=effort == "none",
            keep_as=None if kept is None or self.store is False else response_id,
            conversation=conversation,
        )
        asked.check()
        return asked

    def offered(self) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
        """Yields (namespace, function) of each tool. Raises InvalidArgument for tools of other types."""
        for tool in self.tools or ():
            match tool:
                case {"type": "function"}:
                    yield None, tool
                case {"type": "namespace", "name": str(namespace), "tools": list(functions)}:
                    about = tool.get("description") or ""
                    for function in functions:
                        if function.get("type") != "function":
                            refuse(f"tools: type {function.get('type')!r:.40} in {namespace:.80}", "offer functions")
                        yield namespace, {**function, "description": f"{about} {function.get('description')}".strip()}
                case {"type": kind} if kind in _PLAYED_ELSEWHERE:
                    pass
                case _:
                    refuse(f"tools: type {tool.get('type')!r:.40}", "offer functions")

    def _items(self) -> list[Item]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def _before(self, kept: Kept | None) -> Sequence[TemplateMessage]:
        if kept is None and (self.store or self.previous_response_id):
            field = "previous_response_id" if self.previous_response_id else "store"
            refuse(field, "responses are kept in a session, at /sessions/ID")
        if self.previous_response_id is None or kept is None:
            return ()
        if self.previous_response_id not in kept:
            raise InvalidArgument(
                f"previous_response_id {self.previous_response_id[:80]!r} is no response of this session that was kept",
                field="previous_response_id",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
            )
        return kept[self.previous_response_id]

    def _check_include(self) -> None:
        for name in self.include or ():
            if name not in (_ENCRYPTED, _LOG_PROBS):
                refuse(f"include {name[:80]}", f"it may have {_ENCRYPTED} and {_LOG_PROBS}")

    def _effort(self) -> str | None:
        asked = dict(self.reasoning or {})
        for name in ("summary", "generate_summary"):
            if (value := asked.pop(name, None)) not in (None, "auto"):
                refuse(f"reasoning.{name} {value!r:.40}", "thoughts are not summarized, so leave it out")
        effort: str | None = asked.pop("effort", None)
        for name, value in asked.items():
            if value is not None:
                refuse(f"reasoning.{name[:80]}", "leave it out")
        return effort

    def _constraints(self) -> list[Constraint]:
        asked = dict(self.text or {})
        if (verbosity := asked.get("verbosity")) not in (None, "medium"):
            refuse(f"text.verbosity {verbosity!r:.40}", "leave it out")
        form = asked.get("format") or {"type": "text"}
        match form.get("type"):
            case "text":
                return []
            case "json_object":
                return [Constraint("text.format", "json_schema", '{"type":"object"}')]
            case "json_schema":
                schema = json.dumps(form.get("schema"), separators=(",", ":"))
                return [Constraint("text.format", "json_schema", schema)]
        raise InvalidArgument("text.format.type must be text, json_object or json_schema", field="text.format")

    def _tools(self) -> list[Any] | None:
        if self.tool_choice not in (None, "auto", "none"):
            refuse(f"tool_choice {self.tool_choice!r:.60}", "a response is sampled freely, so write auto or none")
        tools = [
            {
                "type": "function",
                "function": {
                    "name": _name(namespace, tool.get("name")),
                    "description": tool.get("description") or "",
                    "parameters": tool.get("parameters") or {},
                },
            }
            for namespace, tool in self.offered()
        ]
        return None if self.tool_choice == "none" else tools or None


def _name(namespace: str | None, name: Any) -> Any:
    """A function's name as the policy knows it."""
    return f"{namespace}__{name}" if namespace else name


class _Turn:
    """What the policy said in one response: a thought, a text, then calls, of which each may be missing."""

    def __init__(self) -> None:
        self.thoughts, self.texts, self.calls = list[str](), list[str](), list[TemplateMessage]()

    def messages(self) -> list[TemplateMessage]:
        """Returns its message, and none of an empty one."""
        if not (self.thoughts or self.texts or self.calls):
            return []
        return [assistant_message("\n".join(self.thoughts), "".join(self.texts), self.calls)]

    def continues_with(self, kind: str) -> bool:
        return kind == "function_call" or (kind in ("reasoning", "assistant") and not (self.texts or self.calls))


def _template_messages(
    items: Sequence[Item], before: Sequence[TemplateMessage], kept: Kept
) -> Iterator[TemplateMessage]:
    called = {call["id"]: call["function"]["name"] for said in before for call in said.get("tool_calls", ())}
    turn = _Turn()
    for item in items:
        kind = _kind(item)
        if not turn.continues_with(kind):
            yield from turn.messages()
            turn = _Turn()
        match kind:
            case "reasoning":
                turn.thoughts.append(_thought_of(item, kept))
            case "assistant":
                turn.texts.append(_text_of(item.get("content"), "message"))
            case "user" | "system" | "developer":
                yield {"role": kind, "content": _text_of(item.get("content"), "message")}
            case "function_call":
                call_id, name = str(item.get("call_id")), str(_name(item.get("namespace"), item.get("name")))
                called[call_id] = name
                turn.calls.append(template_call(call_id, name, item.get("arguments") or ""))
            case "function_call_output":
                yield _output_of(item, called)
            case _:
                instead = "send messages, function_call, function_call_output and reasoning"
                refuse(f"input: an item of type {kind!r:.40}", instead)
    yield from turn.messages()


def _kind(item: Item) -> str:
    """The type of an item; of a message its role."""
    kind = item.get("type") or "message"
    return str(item.get("role") if kind == "message" else kind)


def _output_of(item: Item, called: Mapping[str, str]) -> TemplateMessage:
    call_id = str(item.get("call_id"))
    if call_id not in called:
        raise InvalidArgument(
            f"input: function_call_output of call_id {call_id:.80}, which no function_call before it has", field="input"
        )
    text = _text_of(item.get("output"), "function_call_output")
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": called[call_id]}


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            refuse(f"input: {where} with {kind!r:.40}", "send text")
    return "\n\n".join(part["text"] for part in parts)


def _thought_of(item: Item, kept: Kept) -> str:
    """A thought that comes back: sealed, as text, or by its id alone."""
    texts = [part.get("text") or "" for part in item.get("content") or ()]
    if thought := signed("\n".join(texts), item.get("encrypted_content"), "input: a reasoning item"):
        return thought
    response_id = str(item.get("id")).replace("rs_", "resp_", 1)
    if conversation := kept.get(response_id):
        return divided_thought(conversation[-1]["content"], in_thought=False)[0]
    refuse("input: a reasoning item without content", f"ask with include {_ENCRYPTED}, or leave it out")
    return ""


def _with_one_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Many templates take one system message, and only as the first."""
    count = next((n for n, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [*([{"role": "system", "content": text}] if count else []), *messages[count:]]


class _Exchange:
    """`POST /v1/responses`: a thought, the text before the first call, and the calls are items."""

    def __init__(self, request: _Request, model: str, kept: Kept | None) -> None:
        self._hex = uuid.uuid4().hex
        self.asked = request.asked(f"resp_{self._hex}", kept)
        self._created = int(time.time())
        self._model = model
        self._request = request
        self._spaces = {
            _name(namespace, tool["name"]): (namespace, tool["name"])
            for namespace, tool in request.offered()
            if namespace
        }
        self._include = request.include or ()
        self._number = -1
        self._items: list[Item] = []
        self._open: str | None = None
        self._thought = self._text = ""

    def body(self, replies: Sequence[Reply], prompt_tokens: int) -> Mapping[str, Any]:
        (reply,) = replies
        return self._ended(reply, prompt_tokens)

    def begin(self, prompt_tokens: int) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def progress(self, thought: str, text: str) -> bytes:
        events = b""
        new, self._thought = said_since(self._thought, thought), thought
        if new:
            events += self._begin("reasoning") + self._part_event("reasoning_text.delta", delta=new)
        if text.strip():
            new, self._text = said_since(self._text, text), text
            events += self._begin("message") if new else b""
            events += self._part_event("output_text.delta", delta=new, logprobs=[]) if new else b""
        return events

    def end(self, reply: Reply, prompt_tokens: int) -> bytes:
        events = self.progress(reply.thought, reply.text)
        whole = list(self._content(reply))
        has_message = any(item["type"] == "message" for item in whole)
        events += self._begin("message") if has_message and self._open != "message" else b""
        events += self._close(self._log_probs(reply))
        for item in whole[len(self._items) :]:
            events += self._call(item)
        status = "incomplete" if reply.is_truncated else "completed"
        return events + self._event(f"response.{status}", response=self._ended(reply, prompt_tokens))

    def failed(self, error: Mapping[str, Any]) -> bytes:
        said = error["error"]
        failure = {"code": said["code"] or "server_error", "message": said["message"]}
        return self._event("response.failed", response=self._response("failed") | {"error": failure})

    # Events

    def _begin(self, kind: str) -> bytes:
        """Begins an item with its one part, unless it is open."""
        if self._open == kind:
            return b""
        events = self._close()
        self._open = kind
        item, part = self._item(kind, "in_progress"), self._part(kind, "")
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return events + added + self._part_event("content_part.added", part=part)

    def _close(self, scores: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """Ends the item that is open; `scores` are the log-probs of its text."""
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        text = self._thought if kind == "reasoning" else self._text
        part, item = self._part(kind, text, scores), self._item(kind, "completed", text, scores)
        done = {"text": text} if kind == "reasoning" else {"text": text, "logprobs": list(scores)}
        self._items[-1] = item
        return (
            self._part_event(f"{part['type']}.done", **done)
            + self._part_event("content_part.done", part=part)
            + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        )

    def _call(self, item: Item) -> bytes:
        index, at = len(self._items), {"item_id": item["id"], "output_index": len(self._items)}
        self._items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        whole = {"name": item["name"], "arguments": item["arguments"]}
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            + self._event("response.function_call_arguments.done", **at, **whole)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(f"response.{kind}", **at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    # Items

    def _content(self, reply: Reply) -> Iterator[Item]:
        if reply.thought:
            yield self._item("reasoning", "completed", reply.thought)
        if reply.text or not (reply.thought or reply.calls):
            yield self._item("message", "completed", reply.text, self._log_probs(reply))
        for number, call in enumerate(reply.calls):
            yield self._function_call(number, call)

    def _item(self, kind: str, status: str, text: str = "", scores: Sequence[Mapping[str, Any]] = ()) -> Item:
        content = [] if status == "in_progress" else [self._part(kind, text, scores)]
        if kind == "message":
            head = {"id": f"msg_{self._hex}", "type": "message", "role": "assistant"}
            return {**head, "status": status, "content": content}
        sealed = sign(text) if _ENCRYPTED in self._include and content else None
        rest: Item = {"id": f"rs_{self._hex}", "type": "reasoning", "summary": []}
        return {**rest, "status": status, "content": content, "encrypted_content": sealed}

    @staticmethod
    def _part(kind: str, text: str, scores: Sequence[Mapping[str, Any]] = ()) -> Item:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}

    def _function_call(self, number: int, call: Call) -> Item:
        namespace, name = self._spaces.get(call.name, (None, call.name))
        of_space = {"namespace": namespace} if namespace else {}
        head = {"id": f"fc_{self._hex}_{number}", "type": "function_call", "status": "completed"}
        return {**head, "call_id": call.call_id, "name": name, **of_space, "arguments": call.arguments}

    def _log_probs(self, reply: Reply) -> Sequence[Mapping[str, Any]]:
        return log_probs(reply) if _LOG_PROBS in self._include else ()

    def _ended(self, reply: Reply, prompt_tokens: int) -> dict[str, Any]:
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if reply.is_truncated else {}
        response = self._response("incomplete" if reply.is_truncated else "completed") | cut
        return response | {"output": list(self._content(reply)), "usage": _usage(prompt_tokens, reply)}

    def _response(self, status: str) -> dict[str, Any]:
        request = self._request
        return {
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": self.asked.keep_as is not None,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _usage(prompt_tokens: int, reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.num_thought_tokens},
        "total_tokens": prompt_tokens + reply.num_tokens,
    }


def read_response(body: bytes, model: str, kept: Kept | None = None) -> _Exchange:
    """Raises InvalidArgument."""
    request = parsed(body, _Request, without_effect=_WITHOUT_EFFECT, asking_nothing=_DEFAULTS, instead=_INSTEAD)
    return _Exchange(request, model, kept)


RESPONSES = Dialect(read_response, error_body)
