"""Requests after the form of two command-line harnesses: long system prompts, twenty tools, long results, hints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = "".join(f"{number}. Work with care, and say what you do in rule {number}.\n" for number in range(280))  # 15 kB
RESULT = "".join(f"{number:>6}\tdef function_{number}(argument): ...\n" for number in range(500))  # 20 kB
PLAYS = ["read", "write", "edit", "shell", *(f"tool_{number}" for number in range(16))]
ABOUT = "Does one thing well. Use absolute paths, and no placeholders. " * 12
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "An absolute path"},
        "lines": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        "mode": {"type": "string", "enum": ["read", "write"]},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
REMINDER = "<system-reminder>\nThe list of things to do is empty.\n</system-reminder>"


@dataclass
class ClaudeCodeForm:
    """`POST /v1/messages?beta=true`, streamed."""

    messages: list[Any] = field(default_factory=list)
    path = "messages?beta=true"
    headers: ClassVar = {
        "x-api-key": "none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "x-app": "cli",
    }

    def body(self) -> dict[str, Any]:
        cached = json.loads(json.dumps(self.messages))
        for message in cached[-2:]:
            message["content"][-1] |= CACHED
        return {
            "model": "claude-sonnet",
            "max_tokens": 32_000,
            "stream": True,
            "system": [{"type": "text", "text": "You are a coding agent."}, {"type": "text", "text": SYSTEM, **CACHED}],
            "tools": [{"name": name, "description": ABOUT, "input_schema": SCHEMA} for name in PLAYS],
            "metadata": {"user_id": "user_0_account__session_0"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "messages": cached,
        }

    def title(self) -> dict[str, Any]:
        """A small request beside the conversation."""
        asked = [{"role": "user", "content": "Write a title of five words: read two files"}]
        return {
            "model": "claude-haiku",
            "max_tokens": 512,
            "stream": True,
            "system": [{"type": "text", "text": "You write titles."}],
            "messages": asked,
            "thinking": {"type": "disabled"},
            "temperature": 1,
            "tools": [],
        }

    def says(self, text: str) -> None:
        blocks = [{"type": "text", "text": REMINDER}, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": blocks})

    def hears(self, told: Any) -> None:
        """The response, and what the tools answer: a long text, and errors."""
        self.messages.append({"role": "assistant", "content": told["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": RESULT}]}
            for block in told["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            results[-1] |= {"content": "<tool_use_error>no such file</tool_use_error>", "is_error": True}
            self.messages.append({"role": "user", "content": [*results, {"type": "text", "text": REMINDER}]})

    def sub_agent(self) -> ClaudeCodeForm:
        return ClaudeCodeForm([{"role": "user", "content": [{"type": "text", "text": "Search the tests."}]}])

    def compacted(self) -> ClaudeCodeForm:
        text = "This session continues an earlier one. In short: two files were read."
        return ClaudeCodeForm([{"role": "user", "content": [{"type": "text", "text": text}]}])


@dataclass
class CodexForm:
    """`POST /v1/responses`, streamed."""

    items: list[Any] = field(default_factory=list)
    path = "responses"
    headers: ClassVar = {
        "authorization": "Bearer none",
        "originator": "codex_exec",
        "session-id": "s",
        "accept-encoding": "zstd",
    }

    def __post_init__(self) -> None:
        parts = [SYSTEM, "<skills_instructions>none</skills_instructions>"]
        said = [("developer", part) for part in parts] + [("user", "<environment_context>here</environment_context>")]
        self.items = [self._message(*one) for one in said] + self.items

    @staticmethod
    def _message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "id": "msg_0", "role": role, "content": [{"type": "input_text", "text": text}]}

    def body(self) -> dict[str, Any]:
        functions = [
            {"type": "function", "name": name, "description": ABOUT, "strict": False, "parameters": SCHEMA}
            for name in PLAYS
        ]
        agents = [{**functions[-1], "name": name} for name in ("spawn_agent", "close_agent")]
        space = {"type": "namespace", "name": "multi_agent_v1", "description": "Helpers.", "tools": agents}
        return {
            "model": "policy",
            "stream": True,
            "input": self.items,
            "tools": [*functions, space, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0",
            "client_metadata": {"turn_id": "0"},
        }

    def title(self) -> dict[str, Any]:
        """A small request beside the conversation."""
        return {
            **self.body(),
            "input": "Write a title of five words.",
            "instructions": "You write titles.",
            "tools": [],
        }

    def says(self, text: str) -> None:
        self.items.append(self._message("user", text))

    def hears(self, told: Any) -> None:
        """The response, whose thought comes back sealed, and what the tools answer: a long text."""
        items = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in told["output"]]
        self.items += [
            {key: value for key, value in item.items() if (item["type"], key) != ("reasoning", "content")}
            for item in items
        ]
        self.items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
            for item in items
            if item["type"] == "function_call"
        ]

    def sub_agent(self) -> CodexForm:
        return CodexForm([self._message("user", "Search the tests.")])

    def compacted(self) -> CodexForm:
        return CodexForm([self._message("user", "Another model began. In short: two files were read.")])
