"""OpenAI's requests and responses, of the chat and of the completions API, and messages as chat templates take them.

A parameter acts, or is refused by its name: none is ignored that would change what is sampled. A recorded session
refuses more of them, because a response that is trained is sampled as the job says.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidArgument
from headrace.limits import (
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    MAX_SAMPLES_PER_GROUP,
    MAX_TOOLS,
    require_between,
)
from headrace.session import RecordedAnswer
from headrace.trajectory import Status
from services.rollout.engine.api import SamplingParams
from services.rollout.production.constraint import require_regex, require_schema
from services.rollout.production.sampling import require_in_range

T = TypeVar("T", bound="_Request")


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
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in self.tool_calls
            ]
        return made


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a response must fit: `kind` as SamplingParams names it, and the parameter that says it."""

    field: str
    kind: str
    text: str

    def check(self) -> None:
        """Raises InvalidArgument."""
        if self.kind == "json_schema":
            require_schema(self.text, self.field)
        else:
            require_regex(self.text, self.field)


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
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """Raises InvalidArgument, which names the parameter."""
        require_between(self.num_choices, 1, MAX_SAMPLES_PER_GROUP, "n")
        if self.stream and self.num_choices > 1:
            raise InvalidArgument("n is more than 1 in a stream: leave stream out", field="n")
        self._check_constraints()
        require_in_range(self._free(SamplingParams(MAX_NEW_TOKENS)), lambda name: _CALLED.get(name, name))

    def _check_constraints(self) -> None:
        constraints = self.constraints()
        for constraint in constraints:
            constraint.check()
        if len(constraints) > 1:
            raise InvalidArgument(
                f"{constraints[0].field} and {constraints[1].field} are both set: leave one of them out",
                field=constraints[1].field,
            )

    def params(self, default: SamplingParams, *, is_recorded: bool) -> SamplingParams:
        """Returns the parameters to sample with.

        In a recorded session temperature, top-p and top-k are the job's: a ratio of policies needs them equal, and so
        it refuses what bends them, or a schema.
        """
        if is_recorded and (field := next(self._bending(), None)):
            raise InvalidArgument(f"{field} must be left out: what is trained is sampled freely", field=field)
        if not is_recorded:
            made = self._free(default)
            return made.at_most(made.max_new_tokens)
        return replace(
            default,
            max_new_tokens=min(self.most_tokens or default.max_new_tokens, default.max_new_tokens),
            stop=(*default.stop, *self.stops),
            stop_token_ids=(*default.stop_token_ids, *(self.stop_token_ids or ())),
        )

    def _free(self, default: SamplingParams) -> SamplingParams:
        """Returns `default` with all that the request asks for, in or out of range."""
        asked: dict[str, Any] = {
            "max_new_tokens": self.most_tokens,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            **{constraint.kind: constraint.text for constraint in self.constraints()},
        }
        return replace(
            default,
            **{name: value for name, value in asked.items() if value is not None},
            seed=self.seed,
            stop=(*default.stop, *self.stops),
            stop_token_ids=(*default.stop_token_ids, *(self.stop_token_ids or ())),
        )

    def _bending(self) -> Iterator[str]:
        """Yields parameters that change which tokens may be sampled, or how likely they are."""
        yield from (constraint.field for constraint in self.constraints())
        for field in ("min_p", "min_tokens", "frequency_penalty", "presence_penalty"):
            if getattr(self, field):
                yield field
        if self.repetition_penalty not in (None, 1):
            yield "repetition_penalty"


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

    @property
    def offered_tools(self) -> list[Any] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def check(self) -> None:
        super().check()
        # What a template would take too long to write.
        require_between(len(self.messages), 1, MAX_MESSAGES, "messages")
        require_between(sum(len(message.tool_calls or ()) for message in self.messages), 0, MAX_MESSAGES, "tool_calls")
        require_between(len(self.tools or ()), 0, MAX_TOOLS, "tools")
        if any(message.function_call is not None for message in self.messages):
            raise InvalidArgument("function_call of a message is not supported: write tool_calls", field="messages")
        if self.top_logprobs:
            raise InvalidArgument(
                "top_logprobs is not supported: logprobs are those of sampled tokens", field="top_logprobs"
            )


class CompletionRequest(_Request, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str
    logprobs: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.echo:
            raise InvalidArgument("echo is not supported: the prompt is yours", field="echo")
        if self.logprobs and self.logprobs > 1:
            raise InvalidArgument("logprobs must be 0 or 1: those of sampled tokens", field="logprobs")


def _arguments(call: ToolCallMessage) -> Mapping[str, Any] | str:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def parsed(body: bytes, kind: type[T]) -> T:
    """Raises InvalidArgument for what is no such request, and for a parameter that would have to be ignored."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(fields, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the request cannot be read: {error}") from error
    for name in fields.keys() - set(kind.__struct_fields__) - _WITHOUT_EFFECT:
        if fields[name] is not None and fields[name] not in _DEFAULTS.get(name, ()):
            instead = _INSTEAD.get(name, "leave it out")
            raise InvalidArgument(f"{name[:80]} is not supported: {instead}", field=name[:80])
    request.check()
    return request


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


@dataclass(frozen=True, slots=True)
class Choice:
    """One response, with what the client is given of it."""

    answer: RecordedAnswer
    message: Message
    pieces: Sequence[str]
    """The text of each token."""

    @property
    def finish_reason(self) -> str:
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.answer.status is Status.TRUNCATED else "stop"

    def log_probs(self) -> dict[str, Any]:
        """Returns the log-probs in the chat API's form."""
        pairs = zip(self.pieces, self.answer.log_probs, strict=True)
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
        ]
        return {"content": content, "refusal": None}


def chat_response(request: ChatRequest, model: str, prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of `POST /v1/chat/completions`."""
    return {
        **_head("chatcmpl", "chat.completion", model),
        "choices": [
            {
                "index": index,
                "message": message_of(choice),
                "finish_reason": choice.finish_reason,
                "logprobs": choice.log_probs() if request.logprobs else None,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(prompt_tokens, choices),
    }


def completion_response(
    request: CompletionRequest, model: str, prompt_tokens: int, choices: Sequence[Choice]
) -> dict[str, Any]:
    """The body of `POST /v1/completions`."""
    return {
        **_head("cmpl", "text_completion", model),
        "choices": [
            {
                "index": index,
                "text": choice.answer.content,
                "finish_reason": choice.finish_reason,
                "logprobs": {"tokens": choice.pieces, "token_logprobs": choice.answer.log_probs}
                if request.logprobs is not None
                else None,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(prompt_tokens, choices),
    }


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant's message; its text is exactly what was sampled before the first tool call."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.answer.content}
    if choice.message.tool_calls:
        message["tool_calls"] = msgspec.to_builtins(choice.message.tool_calls)
    return message


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens of the request and of all its choices."""
    written = sum(len(choice.answer.tokens) for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


class Chunks:
    """The events of one streamed response: they share an id."""

    def __init__(self, request: ChatRequest | CompletionRequest, model: str) -> None:
        is_chat = isinstance(request, ChatRequest)
        self._is_chat = is_chat
        self._wants_usage = bool((request.stream_options or {}).get("include_usage"))
        self._head = _head(*(("chatcmpl", "chat.completion.chunk") if is_chat else ("cmpl", "text_completion")), model)

    def first(self) -> bytes:
        """Says who speaks; nothing in the completions API."""
        return self._event([self._choice({"role": "assistant", "content": ""})]) if self._is_chat else b""

    def text(self, text: str) -> bytes:
        return self._event([self._choice({"content": text}, text)])

    def last(self, choice: Choice, prompt_tokens: int) -> bytes:
        """The tool calls, why it ended, and the usage where it was asked for."""
        calls = msgspec.to_builtins(choice.message.tool_calls or [])
        said = {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]} if calls else {}
        events = self._event([self._choice(said) | {"finish_reason": choice.finish_reason}])
        if self._wants_usage:
            events += _sse({**self._head, "choices": [], "usage": usage(prompt_tokens, [choice])})
        return events + b"data: [DONE]\n\n"

    def _choice(self, delta: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        said = {"delta": delta} if self._is_chat else {"text": text}
        return {"index": 0, **said, "finish_reason": None, "logprobs": None}

    def _event(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        return _sse({**self._head, "choices": choices})


def _sse(event: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
