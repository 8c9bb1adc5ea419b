"""Stand-ins for a run's engine and model, for trying functions.

The engine answers as a run's addresses do: SGLang's `/generate`, and OpenAI's protocol for agents. Every request gets
the same short response. Where tools are offered it calls one first, with arguments that fit the tool's schema, and
answers when it is given the result; `tool_choice` is followed. OpenAI's answers may be streamed.

The model is a folder without weights: a tokenizer whose tokens are bytes, with a chat template that knows tools.
Functions that load the tokenizer of `args.hf_checkpoint` are tried with it where the job names no model that is here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER = "7"
LOG_PROB = -0.5
_MAX_BODY_BYTES = 16 << 20
_ID = "check"


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a body; `events` are streamed instead of a body."""

    status: int
    body: Any = None
    events: Sequence[Any] | None = None


@asynccontextmanager
async def stand_in_engine(tokens: Sequence[int] | None = None) -> AsyncIterator[int]:
    """Its port on 127.0.0.1. `tokens` are those of the response; absent: those of the stand-in model."""
    engine = _Engine(tokens)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


class _Engine:
    def __init__(self, tokens: Sequence[int] | None) -> None:
        self._tokens = tokens

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            size = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0)
            body = await reader.readexactly(min(size, _MAX_BODY_BYTES))
            method, path = head.split()[:2]
            reply = self._reply(method, path.partition("?")[0], body)
            writer.write(_written(reply))
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError, IndexError):
            pass  # what does not speak HTTP is the function's own matter: it sees the connection end
        finally:
            writer.close()

    def _reply(self, method: str, path: str, body: bytes) -> Reply:
        try:
            asked = json.loads(body) if body else {}
        except ValueError as error:
            return _refusal(400, f"the body is no JSON: {error}")
        if not isinstance(asked, dict):
            return _refusal(400, "the body is no JSON object")
        match method, path:
            case "POST", "/generate":
                return self._generate(asked)
            case "GET", "/health" | "/health_generate":
                return Reply(200, {})
            case "POST", _ if path.endswith("/v1/chat/completions"):
                return _chat(asked)
            case "POST", _ if path.endswith("/v1/completions"):
                return _completion(asked)
            case "GET", _ if path.endswith("/v1/models"):
                model = {"id": "policy", "object": "model", "created": 0, "owned_by": "headrace"}
                return Reply(200, {"object": "list", "data": [model]})
        return _refusal(404, f"{method} {path}: a run has POST /generate, /v1/chat/completions and /v1/completions")

    def _generate(self, asked: Mapping[str, Any]) -> Reply:
        params = asked.get("sampling_params") or {}
        first = params[0] if isinstance(params, list) and params else params
        num_choices = first.get("n", 1) if isinstance(first, dict) else 1
        prompts = _asked_prompts(asked)
        made = [self._generated(asked, prompt) for prompt in prompts for _ in range(max(1, num_choices))]
        is_batch = len(made) > 1 or isinstance(asked.get("text"), list) or _is_nested(asked.get("input_ids"))
        if asked.get("stream"):
            return Reply(200, events=made)
        return Reply(200, made if is_batch else made[0])

    def _generated(self, asked: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
        read = stand_in_text(prompt) if isinstance(prompt, list) else str(prompt or "")
        text = ANSWER if self._tokens is not None else _said(read)
        tokens = list(stand_in_tokens(text) if self._tokens is None else self._tokens)
        meta_info: dict[str, Any] = {
            "id": _ID,
            "finish_reason": {"type": "stop", "matched": tokens[-1]},
            "prompt_tokens": max(1, len(prompt) if isinstance(prompt, list) else len(read.encode())),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": "0",
        }
        if asked.get("return_logprob"):
            meta_info["output_token_logprobs"] = [[LOG_PROB, token, None] for token in tokens]
        return {"text": text, "output_ids": tokens, "meta_info": meta_info}


def _asked_prompts(asked: Mapping[str, Any]) -> list[Any]:
    text, tokens = asked.get("text"), asked.get("input_ids")
    if isinstance(text, list):
        return text
    if _is_nested(tokens):
        return list(tokens or ())
    return [tokens if tokens is not None else text]


def _is_nested(tokens: Any) -> bool:
    return isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)


def _said(prompt: str) -> str:
    """Calls the first tool that the stand-in's chat template shows, until there is a result of it."""
    _, found, rest = prompt.partition(TOOLS_START)
    if not found or "<tool_call>" in prompt:
        return ANSWER
    for line in rest.partition(TOOLS_END)[0].strip().splitlines():
        if function := _function(_parsed(line)):
            call = {"name": function.get("name"), "arguments": example_of(function.get("parameters") or {})}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return ANSWER


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _function(tool: Any) -> dict[str, Any] | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) and function.get("name") else None


def _chat(asked: Mapping[str, Any]) -> Reply:
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        return _refusal(400, "messages is empty, or no list")
    call = _chosen_call(asked, messages)
    message: dict[str, Any] = {"role": "assistant", "content": None if call else ANSWER, "refusal": None}
    if call:
        message["tool_calls"] = [call]
    finish = "tool_calls" if call else "stop"
    choices = [
        {"index": number, "message": message, "finish_reason": finish, "logprobs": _logprobs(asked)}
        for number in range(_num_choices(asked))
    ]
    if asked.get("stream"):
        return Reply(200, events=list(_chat_events(asked, message, finish)))
    return Reply(200, {**_head(asked, "chat.completion"), "choices": choices, "usage": _usage(asked)})


def _chosen_call(asked: Mapping[str, Any], messages: Sequence[Any]) -> dict[str, Any] | None:
    functions = [function for tool in asked.get("tools") or () if (function := _function(tool))]
    choice, number = asked.get("tool_choice"), sum(_has_calls(message) for message in messages)
    if not functions or choice == "none" or (choice in (None, "auto") and number):
        return None
    chosen = functions[number % len(functions)]
    if isinstance(choice, dict):
        named = (_function(choice) or {}).get("name")
        chosen = next((each for each in functions if each["name"] == named), chosen)
    arguments = json.dumps(example_of(chosen.get("parameters") or {}))
    called = {"name": chosen["name"], "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": called}


def _has_calls(message: Any) -> bool:
    return isinstance(message, dict) and bool(message.get("tool_calls"))


def _chat_events(asked: Mapping[str, Any], message: Mapping[str, Any], finish: str) -> Iterator[Any]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas += [
            {"tool_calls": [{**call, "index": number, "function": {"name": name, "arguments": ""}}]},
            {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]},
        ]
    if message["content"]:
        deltas.append({"content": message["content"]})
    head = _head(asked, "chat.completion.chunk")
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish, "logprobs": None}]}
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(asked)}


def _completion(asked: Mapping[str, Any]) -> Reply:
    head = _head(asked, "text_completion")
    choices = [
        {"index": number, "text": ANSWER, "finish_reason": "stop", "logprobs": None}
        for number in range(_num_choices(asked))
    ]
    whole = {**head, "choices": choices, "usage": _usage(asked)}
    return Reply(200, events=[whole]) if asked.get("stream") else Reply(200, whole)


def _num_choices(asked: Mapping[str, Any]) -> int:
    number = asked.get("n")
    return number if isinstance(number, int) and 0 < number <= 128 else 1


def _logprobs(asked: Mapping[str, Any]) -> Any:
    if not asked.get("logprobs"):
        return None
    token = {"token": ANSWER, "logprob": LOG_PROB, "bytes": list(ANSWER.encode()), "top_logprobs": []}
    return {"content": [token], "refusal": None}


def _head(asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": _ID, "object": kind, "created": int(time.time()), "model": str(asked.get("model") or "policy")}


def _usage(asked: Mapping[str, Any]) -> dict[str, int]:
    prompt = len(json.dumps(asked.get("messages") or asked.get("prompt") or "")) // 4 + 1
    return {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}


def _refusal(status: int, message: str) -> Reply:
    return Reply(status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})


def _written(reply: Reply) -> bytes:
    head = f"HTTP/1.1 {reply.status} {'OK' if reply.status == 200 else 'Refused'}\r\nConnection: close\r\n"
    if reply.events is not None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in reply.events]
        return (f"{head}Content-Type: text/event-stream\r\n\r\n" + "".join(lines) + "data: [DONE]\n\n").encode()
    body = json.dumps(reply.body).encode()
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
TURN_END_ID = 257
TOOLS_START, TOOLS_END = "<tools>", "</tools>"
_SPECIAL = {TURN_START: 256, TURN_END: TURN_END_ID}
_MAX_TOKENS = 32_768
_CHAT_TEMPLATE = (
    "{% if tools %}"
    "<|im_start|>system\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools><|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_stand_in_model(folder: Path) -> None:
    """Writes the files that transformers' AutoTokenizer and AutoConfig read."""
    tokens = [{"id": number, "content": text} | _PLAIN_TOKEN for text, number in _SPECIAL.items()]
    spaces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": spaces,
        "post_processor": None,
        "decoder": spaces,
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in _characters().items()}, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "model_max_length": _MAX_TOKENS,
        "chat_template": _CHAT_TEMPLATE,
    }
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("config.json", {"model_type": "qwen2", "vocab_size": TURN_END_ID + 1, "eos_token_id": TURN_END_ID}),
    ):
        (folder / name).write_text(json.dumps(content))


def stand_in_tokens(text: str) -> list[int]:
    """The tokens of a response, with the one that ends its turn."""
    return [*text.encode(), TURN_END_ID]


def stand_in_text(tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")


_PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _characters() -> dict[int, str]:
    """The printable character that stands for each byte in files of byte-level tokenizers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_MAX_DEPTH = 8
_ABSENT = object()
_FORMATS = {
    "date": "2024-01-02",
    "date-time": "2024-01-02T03:04:05Z",
    "time": "03:04:05Z",
    "duration": "PT1S",
    "email": "someone@example.org",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000007",
    "ipv4": "127.0.0.1",
}


def example_of(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A small value that the schema allows: required properties alone. A `pattern` of text is not followed."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {} if depth == 0 else None
    if isinstance(reference := schema.get("$ref"), str):
        return example_of(_referred(root, reference), root, depth + 1)
    if named := [schema[key] for key in ("const", "default") if schema.get(key) is not None]:
        return named[0]
    for key in ("enum", "examples"):
        if isinstance(values := schema.get(key), Sequence) and values:
            return values[0]
    if (combined := _of_parts(schema, root, depth)) is not _ABSENT:
        return combined
    return _of_type(_type(schema, depth), schema, root, depth)


def _of_parts(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), Sequence) and options:
            first = next((each for each in options if not _is_null(each)), options[0])
            return example_of(first, root, depth + 1)
    parts = schema.get("allOf")
    if not isinstance(parts, Sequence) or not parts:
        return _ABSENT
    values = [example_of(part, root, depth + 1) for part in parts]
    if not all(isinstance(value, dict) for value in values):
        return values[0]
    return {key: item for value in values for key, item in value.items()} | _object(schema, root, depth)


def _of_type(kind: str, schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            count = schema.get("minItems") or 1
            return [example_of(schema.get("items", {}), root, depth + 1) for _ in range(min(count, 8))]
        case "integer" | "number":
            return _number(schema, is_integer=kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
    text = _FORMATS.get(str(schema.get("format")), "7")
    return text.ljust(int(schema.get("minLength") or 0), "7")


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    names = required if isinstance(required, Sequence) else ()
    return {name: example_of(known.get(name, {"type": "string"}), root, depth + 1) for name in names}


def _number(schema: Mapping[str, Any], *, is_integer: bool) -> int | float:
    step = schema.get("multipleOf") or 1
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    value = 7.0
    if least is not None and value <= least:
        value = least if "minimum" in schema else least + step
    if most is not None and value >= most:
        value = most if "maximum" in schema else max(most - step, (most + (least or most - 2)) / 2)
    if value % step:
        value += step - value % step
    return int(value) if is_integer or value == int(value) else value


def _type(schema: Mapping[str, Any], depth: int) -> str:
    kind = schema.get("type")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        kind = next((each for each in kind if each != "null"), "null")
    if isinstance(kind, str):
        return kind
    if "properties" in schema or depth == 0:
        return "object"
    return "array" if "items" in schema else "string"


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _referred(root: Any, reference: str) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found
