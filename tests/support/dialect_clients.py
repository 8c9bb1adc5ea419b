"""Clients of each dialect as agents are: they send back what they were told, in the dialect's own form."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.rollout.agents.dialects.chat import CHAT, COMPLETIONS
from services.rollout.agents.dialects.core import Dialect
from services.rollout.agents.dialects.messages import MESSAGES
from services.rollout.agents.dialects.responses import RESPONSES

Thread = list[dict[str, Any]]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}


@dataclass
class Client:
    """A conversation is a list of items in the dialect's form, the last of which a user or a tool has said."""

    dialect: Dialect
    choose: random.Random
    has_tools: bool = False
    tools: list[Any] = field(default_factory=list)
    has_choices: bool = False

    def user(self, text: str) -> Thread:
        return [{"role": "user", "content": text}]

    def system(self, text: str) -> Thread:
        return [{"role": "system", "content": text}]

    def body(self, thread: Thread, **fields: Any) -> dict[str, Any]:
        return {"messages": thread, **self._tools(), **fields}

    def _tools(self) -> dict[str, Any]:
        return {"tools": self.tools} if self.has_tools else {}

    def read(self, thread: Thread, kept: Any, **fields: Any) -> Any:
        return self.dialect.read(json.dumps(self.body(thread, **fields)).encode(), "m", kept)

    def told(self, events: bytes) -> Any:
        """The same body that a request without a stream is answered with."""
        raise NotImplementedError

    def said(self, body: Any) -> Thread:
        """What is sent back of a response."""
        raise NotImplementedError

    def edited(self, said: Thread) -> Thread:
        """The same as if a person had changed its text."""
        raise NotImplementedError

    def results(self, said: Thread) -> Thread:
        """What tools answer to the calls in it; nothing where there are none."""
        raise NotImplementedError


def events_of(events: bytes) -> list[Any]:
    datas = [line.removeprefix("data: ") for line in events.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(data) for data in datas if data != "[DONE]"]


class ChatClient(Client):
    """`POST /v1/chat/completions`."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__(CHAT, choose, tools=[{"type": "function", "function": FUNCTION}], has_choices=True)

    def told(self, events: bytes) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for event in events_of(events):
            delta = event["choices"][0]["delta"]
            message["content"] += delta.get("content", "")
            if calls := delta.get("tool_calls"):
                message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {"choices": [{"message": message}]}

    def said(self, body: Any) -> Thread:
        return [self.choose.choice(body["choices"])["message"]]

    def edited(self, said: Thread) -> Thread:
        return [{**said[0], "content": said[0]["content"].strip().upper()}]

    def results(self, said: Thread) -> Thread:
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{self.choose.randint(0, 99)}"}
            for call in said[0].get("tool_calls", ())
        ]


class CompletionsClient(Client):
    """`POST /v1/completions`: a conversation is one text."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__(COMPLETIONS, choose, has_choices=True)

    def user(self, text: str) -> Thread:
        return [{"text": f"{text}\n"}]

    system = user

    def body(self, thread: Thread, **fields: Any) -> dict[str, Any]:
        return {"prompt": "".join(item["text"] for item in thread), **fields}

    def told(self, events: bytes) -> Any:
        return {"choices": [{"text": "".join(event["choices"][0]["text"] for event in events_of(events))}]}

    def said(self, body: Any) -> Thread:
        return [{"text": self.choose.choice(body["choices"])["text"]}]

    def edited(self, said: Thread) -> Thread:
        return [{"text": said[0]["text"].strip().upper()}]

    def results(self, said: Thread) -> Thread:
        return []


class MessagesClient(Client):
    """`POST /v1/messages`."""

    def __init__(self, choose: random.Random) -> None:
        tool = {"name": "add", "description": "adds", "input_schema": SCHEMA}
        super().__init__(MESSAGES, choose, tools=[{**tool, "cache_control": {"type": "ephemeral"}}])

    def body(self, thread: Thread, **fields: Any) -> dict[str, Any]:
        system = [item["content"] for item in thread if item["role"] == "system"]
        said = [item for item in thread if item["role"] != "system"]
        return super().body(said, **({"system": system[0]} if system else {}), **fields)

    def told(self, events: bytes) -> Any:
        blocks = list[Any]()
        for event in events_of(events):
            match event:
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append({**block, **({"input": ""} if "input" in block else {})})
                case {"type": "content_block_delta", "delta": {"type": kind, **delta}}:
                    ((name, text),) = delta.items()
                    blocks[-1]["input" if kind == "input_json_delta" else name] += text
        for block in blocks:
            if "input" in block:
                block["input"] = json.loads(block["input"])
        return {"content": blocks}

    def said(self, body: Any) -> Thread:
        def as_javascript(block: Any) -> Any:
            calls = block["type"] == "tool_use"
            return {**block, "input": json.loads(json.dumps(block["input"]).replace(".0}", "}"))} if calls else block

        return [{"role": "assistant", "content": [as_javascript(block) for block in body["content"]]}]

    def edited(self, said: Thread) -> Thread:
        def changed(block: Any) -> Any:
            return {**block, "text": block["text"].strip().upper()} if block["type"] == "text" else block

        keeps_thoughts = self.choose.random() < 0.5
        blocks = [changed(block) for block in said[0]["content"] if keeps_thoughts or block["type"] != "thinking"]
        return [{"role": "assistant", "content": blocks}]

    def results(self, said: Thread) -> Thread:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"{self.choose.randint(0, 99)}"}
            for block in said[0]["content"]
            if block["type"] == "tool_use"
        ]
        return [{"role": "user", "content": results}] if results else []


class ResponsesClient(Client):
    """`POST /v1/responses`: sends all items, as they were or with sealed thoughts, or names the previous response."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__(RESPONSES, choose, tools=[{"type": "function", "strict": False, **FUNCTION}])
        self.way = choose.choice(("items", "sealed", "previous"))

    def body(self, thread: Thread, **fields: Any) -> dict[str, Any]:
        named = max((place for place, item in enumerate(thread) if "previous" in item), default=None)
        if named is not None:
            fields |= {"previous_response_id": thread[named]["previous"]}
            thread = thread[named + 1 :]
        if self.way == "sealed":
            fields |= {"include": ["reasoning.encrypted_content"], "store": False}
        return {"input": thread, **self._tools(), **fields}

    def told(self, events: bytes) -> Any:
        return events_of(events)[-1]["response"]

    def said(self, body: Any) -> Thread:
        items = [dict(item) for item in body["output"]]
        if self.way == "previous":
            calls = [call for call in items if call["type"] == "function_call"]
            return [{"previous": body["id"], "calls": calls}]
        for item in items:
            if self.way == "sealed" and item["type"] == "reasoning":
                del item["content"]
        return items

    def edited(self, said: Thread) -> Thread:
        return [
            {**item, "content": item["content"][0]["text"].strip().upper()} if item.get("role") else item
            for item in said
        ]

    def results(self, said: Thread) -> Thread:
        calls: Sequence[Any] = said[0].get("calls", said)
        return [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"{self.choose.randint(0, 99)}"}
            for call in calls
            if call["type"] == "function_call"
        ]


CLIENTS: dict[str, type[Any]] = {
    "chat": ChatClient,
    "completions": CompletionsClient,
    "messages": MessagesClient,
    "responses": ResponsesClient,
}
