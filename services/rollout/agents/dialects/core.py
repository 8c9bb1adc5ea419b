"""What a request asks and what its reply says, in no dialect.

A parameter acts, or is refused by its name: none is ignored that would change what is sampled. A recorded session
refuses more of them, because a response that is trained is sampled as the job says.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.errors import InvalidArgument
from headrace.limits import MAX_MESSAGES, MAX_NEW_TOKENS, MAX_TOOLS, require_between
from headrace.session import RecordedAnswer
from headrace.trajectory import Status
from services.rollout.engine.api import SamplingParams
from services.rollout.production.constraint import require_regex, require_schema
from services.rollout.production.sampling import require_in_range

T = TypeVar("T", bound=msgspec.Struct)
TemplateMessage = dict[str, Any]
"""A message as chat templates take it: content as text, arguments of tool calls as objects."""
_SIGNED = "headrace."
"""Signatures of this endpoint begin so."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


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


@dataclass(frozen=True, slots=True)
class Settings:
    """How a response is to be sampled; `values` by the names of `SamplingParams`, None for what the job says."""

    values: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    constraints: Sequence[Constraint] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    """The dialect's names of `values`, where they differ."""

    def check(self) -> None:
        """Raises InvalidArgument, which names the parameter."""
        for constraint in self.constraints:
            constraint.check()
        if len(self.constraints) > 1:
            first, second, *_ = (constraint.field for constraint in self.constraints)
            raise InvalidArgument(f"{first} and {second} are both set: leave one of them out", field=second)
        require_in_range(self._free(SamplingParams(MAX_NEW_TOKENS)), self._name)

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
            max_new_tokens=min(self.values.get("max_new_tokens") or default.max_new_tokens, default.max_new_tokens),
            stop=(*default.stop, *self.stops),
            stop_token_ids=(*default.stop_token_ids, *self.stop_token_ids),
        )

    def _free(self, default: SamplingParams) -> SamplingParams:
        """Returns `default` with all that the request asks for, in or out of range."""
        asked: dict[str, Any] = {name: value for name, value in self.values.items() if value is not None}
        return replace(
            default,
            **asked | {constraint.kind: constraint.text for constraint in self.constraints},
            seed=self.seed,
            stop=(*default.stop, *self.stops),
            stop_token_ids=(*default.stop_token_ids, *self.stop_token_ids),
        )

    def _bending(self) -> Iterator[str]:
        """Yields parameters that change which tokens may be sampled, or how likely they are."""
        yield from (constraint.field for constraint in self.constraints)
        for name in ("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty"):
            if self.values.get(name):
                yield self._name(name)
        if self.values.get("repetition_penalty") not in (None, 1):
            yield self._name("repetition_penalty")

    def _name(self, name: str) -> str:
        return self.called.get(name, name)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: a conversation, or a text where `messages` is None."""

    settings: Settings
    messages: Sequence[TemplateMessage] | None = None
    text: str = ""
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for this request."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Variables that act where the chat template reads them."""
    num_choices: int = 1
    stream: bool = False
    splits_thoughts: bool = False
    """The client is given a thought as one, and not in the text."""
    without_thoughts: bool = False
    """The response must not begin with a thought, as far as the chat template can say so."""
    keep_as: str | None = None
    """The id under which a later request names this conversation."""
    conversation: Sequence[TemplateMessage] = ()
    """What is kept of the request then."""

    def check(self) -> None:
        """Raises InvalidArgument, which names the parameter."""
        self.settings.check()
        if self.messages is not None:  # what a template would take too long to write
            calls = sum(len(message.get("tool_calls") or ()) for message in self.messages)
            require_between(len(self.messages), 1, MAX_MESSAGES, "messages")
            require_between(calls, 0, MAX_MESSAGES, "tool_calls")
        require_between(len(self.tools or ()), 0, MAX_TOOLS, "tools")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a response; its arguments are a JSON object as text."""

    call_id: str
    name: str
    arguments: str

    def for_template(self) -> TemplateMessage:
        return template_call(self.call_id, self.name, self.arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """One response as the client is given it."""

    answer: RecordedAnswer
    text: str
    calls: Sequence[Call] = ()
    thought: str = ""
    stop: str | None = None
    """The stop string of the request that ended it."""
    decode: Callable[[Sequence[int]], str] = lambda _: ""

    @property
    def pieces(self) -> list[str]:
        """The text of each token."""
        return [self.decode([token]) for token in self.answer.tokens]

    @property
    def is_truncated(self) -> bool:
        return self.answer.status is Status.TRUNCATED

    @property
    def num_tokens(self) -> int:
        return len(self.answer.tokens)

    @property
    def num_thought_tokens(self) -> int:
        """The tokens of the thought, with its marks."""
        end, characters = self.answer.text.find("</think>"), 0
        for number, piece in enumerate(self.pieces if self.thought else ()):
            if 0 <= end < characters:
                return number
            characters += len(piece)
        return self.num_tokens if self.thought else 0

    def message(self) -> TemplateMessage:
        """The message that the client sends back, as the record knows it."""
        return assistant_message(self.thought, self.text, [call.for_template() for call in self.calls])


class Exchange(Protocol):
    """A request and its reply in one dialect; the methods behind `body` are for a stream, in this order."""

    asked: Asked

    def body(self, replies: Sequence[Reply], prompt_tokens: int) -> Mapping[str, Any]:
        """The reply as JSON."""

    def begin(self, prompt_tokens: int) -> bytes:
        """The events before the first token."""

    def progress(self, thought: str, text: str) -> bytes:
        """The events for what was said since the last time, of all that was said so far."""

    def end(self, reply: Reply, prompt_tokens: int) -> bytes:
        """All events that are left."""

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """The event of an error after the first one. `error` is the body that a status of its own would have."""


Kept = Mapping[str, Sequence[TemplateMessage]]
"""Conversations of a session by the ids of their responses."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How requests at one path are read, and their errors written."""

    read: Callable[[bytes, str, Kept | None], Exchange]
    """Of a body, the model's name and what the session keeps (None outside of one). Raises InvalidArgument."""
    error: Callable[[int, str, str, str | None, str | None], Mapping[str, Any]]
    """Of a status, OpenAI's type, the message, the parameter and the code."""
    versions: tuple[str, Sequence[str]] | None = None
    """A header, and the values that it may have where a client sends it."""


def assistant_message(thought: str, text: str, calls: Sequence[TemplateMessage]) -> TemplateMessage:
    """The policy's turn. A thought stands in the text, where templates find it, also those that know no other place."""
    content = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def template_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> TemplateMessage:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(arguments: str | Mapping[str, Any]) -> Mapping[str, Any] | str:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def parsed(
    body: bytes,
    kind: type[T],
    *,
    without_effect: frozenset[str],
    asking_nothing: Mapping[str, Sequence[Any]],
    instead: Mapping[str, str] = NOTHING,
) -> T:
    """Raises InvalidArgument for what is no such request, and for a parameter that would have to be ignored.

    `asking_nothing` are parameters that are not supported, with the values that ask for nothing; null always does.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(fields, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the request cannot be read: {error}") from error
    for name in fields.keys() - set(kind.__struct_fields__) - without_effect:
        if fields[name] is not None and fields[name] not in asking_nothing.get(name, ()):
            refuse(name[:80], instead.get(name, "leave it out"))
    return request


def refuse(field: str, instead: str) -> None:
    """Raises InvalidArgument for what the endpoint cannot do."""
    raise InvalidArgument(f"{field} is not supported: {instead}", field=field)


def sign(thought: str) -> str:
    """Returns what a client sends back with a thought. It holds the thought, for clients that are not shown it."""
    return _SIGNED + base64.b64encode(thought.encode(errors="surrogatepass")).decode()


def signed(thought: str, signature: Any, what: str) -> str:
    """Returns the thought that comes back with its signature. Raises InvalidArgument for one that was changed."""
    if not isinstance(signature, str) or not signature.startswith(_SIGNED):
        return thought  # another model's
    try:
        known = base64.b64decode(signature.removeprefix(_SIGNED), validate=True).decode(errors="surrogatepass")
    except ValueError:
        known = None
    if known is None or thought not in ("", known):
        raise InvalidArgument(f"{what} was changed: send it back as it was given, or leave it out")
    return known


def said_since(sent: str, text: str) -> str:
    """What of a text is new behind what was sent of it."""
    return text[len(sent) :] if text.startswith(sent) else ""


def sse(event: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(event) + b"\n\n"
