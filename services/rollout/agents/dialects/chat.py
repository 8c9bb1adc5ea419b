"""OpenAI's chat and completions API."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidArgument
from headrace.limits import MAX_SAMPLES_PER_GROUP, require_between
from services.rollout.agents.dialects.core import (
    Asked,
    Call,
    Constraint,
    Dialect,
    Kept,
    Reply,
    Settings,
    parsed,
    refuse,
    said_since,
    sse,
    template_call,
)

_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "rid", "request_id", "cache_salt", "extra_key"),
    }
)
"""Parameters that change nothing here; `parallel_tool_calls` is a wish, as `tool_choice` is."""
_OFF = (
    *("ignore_eos", "use_beam_search", "early_stopping", "no_stop_trim", "include_stop_str_in_output", "echo"),
    *("continue_final_message", "separate_reasoning", "stream_reasoning", "include_reasoning", "return_token_ids"),
    *("return_hidden_states", "return_routed_experts", "return_meta_info", "return_prompt_token_ids"),
)
_DEFAULTS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(_OFF, (False,)),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
"""Parameters that are not supported, with the values that ask for nothing; null always does."""
_CALLED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names of OpenAI for those of `SamplingParams`, where they differ."""
_INSTEAD = {"functions": "offer tools", "function_call": "write tool_choice"}


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
                template_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return made


class _Request(msgspec.Struct, kw_only=True):
    """The parameters that both APIs have."""

    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    regex: str | None = None
    """SGLang's: the response fits it as a whole. So do `ebnf` and `json_schema`; vLLM's names for these follow."""
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None

    def constraints(self) -> list[Constraint]:
        """Returns what the response must fit. Raises InvalidArgument for a form of it that is unknown."""
        given = [
            ("json_schema", "json_schema", self.json_schema),
            ("regex", "regex", self.regex),
            ("ebnf", "ebnf", self.ebnf),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_grammar", "ebnf", self.guided_grammar),
            ("guided_choice", "regex", None if self.guided_choice is None else _any_of(self.guided_choice)),
            *_structured(self.structured_outputs),
        ]
        return [Constraint(field, kind, _text(value)) for field, kind, value in given if value is not None]

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def settings(self) -> Settings:
        """Returns how the response is to be sampled. Raises InvalidArgument as `constraints` does."""
        values = {
            "max_new_tokens": self.most_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Settings(values, stops, tuple(self.stop_token_ids or ()), self.seed, self.constraints(), _CALLED)

    def choices(self) -> int:
        """Returns `n`. Raises InvalidArgument where it is out of range."""
        number = 1 if self.n is None else self.n
        require_between(number, 1, MAX_SAMPLES_PER_GROUP, "n")
        if self.stream and number > 1:
            raise InvalidArgument("n is more than 1 in a stream: leave stream out", field="n")
        return number


class ChatRequest(_Request, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, for this request."""
    reasoning_effort: str | None = None

    @property
    def variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def constraints(self) -> list[Constraint]:
        """Raises InvalidArgument for another type than text, json_object and json_schema."""
        schema = self._schema()
        return [
            *([] if schema is None else [Constraint("response_format", "json_schema", schema)]),
            *super().constraints(),
        ]

    def _schema(self) -> str | None:
        form = self.response_format or {"type": "text"}
        match form.get("type"):
            case "text":
                return None
            case "json_object":
                return '{"type":"object"}'
            case "json_schema":
                described = form.get("json_schema")
                schema = described.get("schema") if isinstance(described, dict) else None
                return msgspec.json.encode(schema).decode()  # one that is no object is refused as such
        raise InvalidArgument(
            "response_format.type must be text, json_object or json_schema", field="response_format.type"
        )

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def asked(self) -> Asked:
        """Raises InvalidArgument, which names the parameter."""
        if any(message.function_call is not None for message in self.messages):
            raise InvalidArgument("function_call of a message is not supported: write tool_calls", field="messages")
        if self.top_logprobs:
            refuse("top_logprobs", "logprobs are those of sampled tokens")
        asked = Asked(
            self.settings(),
            [message.for_template() for message in self.messages],
            tools=None if self.tool_choice == "none" else self.tools or None,
            variables=self.variables,
            num_choices=self.choices(),
            stream=bool(self.stream),
        )
        asked.check()
        return asked


class CompletionRequest(_Request, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str
    logprobs: int | None = None
    echo: bool | None = None

    def asked(self) -> Asked:
        """Raises InvalidArgument, which names the parameter."""
        if self.echo:
            refuse("echo", "the prompt is yours")
        if self.logprobs and self.logprobs > 1:
            raise InvalidArgument("logprobs must be 0 or 1: those of sampled tokens", field="logprobs")
        asked = Asked(self.settings(), text=self.prompt, num_choices=self.choices(), stream=bool(self.stream))
        asked.check()
        return asked


def _structured(asked: Mapping[str, Any] | None) -> list[tuple[str, str, Any]]:
    """VLLM's `structured_outputs`: an object with one of these."""
    found = []
    for name, value in (asked or {}).items():
        if value is None or value is False:
            continue
        field = f"structured_outputs.{name[:80]}"
        match name, value:
            case "json", str() | dict():
                found.append((field, "json_schema", value))
            case "json_object", True:
                found.append((field, "json_schema", {"type": "object"}))
            case "regex", str():
                found.append((field, "regex", value))
            case "grammar", str():
                found.append((field, "ebnf", value))
            case "choice", list() if all(isinstance(choice, str) for choice in value):
                found.append((field, "regex", _any_of(value)))
            case _:
                raise InvalidArgument(
                    f"{field} is not supported: write json, regex, choice or grammar", field="structured_outputs"
                )
    return found


def _any_of(choices: Sequence[str]) -> str:
    """A regular expression for one of these texts."""
    escaped = (re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", choice) for choice in choices)
    return f"({'|'.join(escaped)})" if choices else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class _Exchange:
    """What both APIs have of a request and its reply."""

    def __init__(self, request: ChatRequest | CompletionRequest, prefix: str, kind: str, model: str) -> None:
        self.asked = request.asked()
        self._wants_usage = bool((request.stream_options or {}).get("include_usage"))
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        self._sent = ""

    def body(self, replies: Sequence[Reply], prompt_tokens: int) -> Mapping[str, Any]:
        choices = [{"index": index, **self._choice(reply)} for index, reply in enumerate(replies)]
        return {**self._head, "choices": choices, "usage": _usage(prompt_tokens, replies)}

    def progress(self, thought: str, text: str) -> bytes:
        new, self._sent = said_since(self._sent, text), text
        return self._event(self._delta(new)) if new else b""

    def end(self, reply: Reply, prompt_tokens: int) -> bytes:
        events = self.progress("", reply.text)
        events += self._event({**self._last_delta(reply), "finish_reason": _finish_reason(reply)})
        if self._wants_usage:
            events += sse({**self._head, "choices": [], "usage": _usage(prompt_tokens, [reply])})
        return events + b"data: [DONE]\n\n"

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse(error)

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return sse({**self._head, "choices": [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]})

    def _choice(self, reply: Reply) -> Mapping[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def _last_delta(self, reply: Reply) -> Mapping[str, Any]:
        return self._delta("")


class _Chat(_Exchange):
    """`POST /v1/chat/completions`. The text is exactly what was sampled before the first tool call."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(request, "chatcmpl", kind, model)
        self._wants_log_probs = request.logprobs

    def begin(self, prompt_tokens: int) -> bytes:
        return self._event({"delta": {"role": "assistant", "content": ""}})

    def _choice(self, reply: Reply) -> Mapping[str, Any]:
        calls = {"tool_calls": [_call(call) for call in reply.calls]} if reply.calls else {}
        return {
            "message": {"role": "assistant", "content": reply.text, **calls},
            "finish_reason": _finish_reason(reply),
            "logprobs": {"content": log_probs(reply), "refusal": None} if self._wants_log_probs else None,
        }

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"delta": {"content": text}}

    def _last_delta(self, reply: Reply) -> Mapping[str, Any]:
        calls = [{"index": index, **_call(call)} for index, call in enumerate(reply.calls)]
        return {"delta": {"tool_calls": calls} if calls else {}}


class _Completion(_Exchange):
    """`POST /v1/completions`."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        super().__init__(request, "cmpl", "text_completion", model)
        self._wants_log_probs = request.logprobs is not None

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def _choice(self, reply: Reply) -> Mapping[str, Any]:
        pairs = None
        if self._wants_log_probs:
            pairs = {"tokens": reply.pieces, "token_logprobs": reply.answer.log_probs}
        return {"text": reply.text, "finish_reason": _finish_reason(reply), "logprobs": pairs}

    def _delta(self, text: str) -> Mapping[str, Any]:
        return {"text": text}


def _call(call: Call) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": call.arguments}, "id": call.call_id, "type": "function"}


def _finish_reason(reply: Reply) -> str:
    if reply.calls:
        return "tool_calls"
    return "length" if reply.is_truncated else "stop"


def log_probs(reply: Reply) -> list[dict[str, Any]]:
    """The log-probs of a reply's tokens in OpenAI's form."""
    pairs = zip(reply.pieces, reply.answer.log_probs, strict=True)
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
    ]


def _usage(prompt_tokens: int, replies: Sequence[Reply]) -> dict[str, int]:
    """Tokens of the request and of all its choices."""
    written = sum(reply.num_tokens for reply in replies)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def error_body(status: int, kind: str, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _request(body: bytes, kind: type[Any]) -> Any:
    return parsed(body, kind, without_effect=_WITHOUT_EFFECT, asking_nothing=_DEFAULTS, instead=_INSTEAD)


def read_chat(body: bytes, model: str, kept: Kept | None = None) -> _Chat:
    """Raises InvalidArgument."""
    return _Chat(_request(body, ChatRequest), model)


def read_completion(body: bytes, model: str, kept: Kept | None = None) -> _Completion:
    """Raises InvalidArgument."""
    return _Completion(_request(body, CompletionRequest), model)


CHAT = Dialect(read_chat, error_body)
COMPLETIONS = Dialect(read_completion, error_body)
