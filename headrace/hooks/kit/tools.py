"""Tools for the policy: functions by name, with a schema, a time limit and a limit of what they may say."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints, overload

import msgspec

from headrace.errors import AlreadyExists, InvalidArgument
from headrace.hooks.kit.conversation import AssistantMessage
from headrace.hooks.kit.tool_call import ToolCall, divided_response
from headrace.limits import did_you_mean
from headrace.rpc import tracing

SECONDS = 10.0
MAX_CHARACTERS = 4_000

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `arguments` is what a call's arguments are converted to; None: it takes them as they are."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    arguments: type[msgspec.Struct] | None
    seconds: float
    max_characters: int

    def schema(self) -> dict[str, Any]:
        """Returns the schema in OpenAI's form, which chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The tool's answer. What goes wrong is an answer as well: the policy reads it, and may try again."""
        try:
            given = _converted(arguments, self.arguments) if self.arguments else arguments
        except msgspec.ValidationError as error:
            return f"error: {self.name}: {error}"
        try:
            with tracing.span(f"execute_tool {self.name}"):
                async with asyncio.timeout(self.seconds):
                    found = await self._called(given)
        except TimeoutError:
            return f"error: {self.name} took longer than {self.seconds:g} s"
        except Exception as error:  # noqa: BLE001  # a user's code
            return self._cut(f"error: {type(error).__name__}: {error}")
        return self._cut(found if isinstance(found, str) else _as_json(found))

    async def _called(self, arguments: Mapping[str, Any]) -> Any:
        """A function that is no coroutine runs in a thread: others go on, and the time limit holds for the waiting."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await asyncio.to_thread(self.function, **arguments)

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]}\n… cut: {len(text)} characters, {self.max_characters} are shown"


class Tools:
    """The tools of a generate function. `seconds` and `max_characters` hold for those that say nothing else.

    >>> tools = Tools()
    >>> @tools.register
    ... def multiply(a: int, b: int) -> int:
    ...     '''The product of two numbers.'''
    ...     return a * b
    """

    def __init__(self, *, seconds: float = SECONDS, max_characters: int = MAX_CHARACTERS) -> None:
        self._seconds = seconds
        self._max_characters = max_characters
        self._tools: dict[str, Tool] = {}

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    @overload
    def register(self, function: F) -> F: ...

    @overload
    def register(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        seconds: float | None = None,
        max_characters: int | None = None,
    ) -> Callable[[F], F]: ...

    def register(
        self,
        function: F | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        seconds: float | None = None,
        max_characters: int | None = None,
    ) -> F | Callable[[F], F]:
        """Decorates a function, with `await` or without: its parameters' types are the schema, its docstring says more.

        Raises InvalidArgument for a parameter that JSON cannot give, AlreadyExists for a name that is taken.
        """

        def registered(made: F) -> F:
            called = name or made.__name__
            arguments = _arguments_of(called, made)
            self.add(
                Tool(
                    name=called,
                    description=description or inspect.getdoc(made) or "",
                    parameters=_inlined(msgspec.json.schema(arguments)),
                    function=made,
                    arguments=arguments,
                    seconds=seconds or self._seconds,
                    max_characters=max_characters or self._max_characters,
                )
            )
            return made

        return registered if function is None else registered(function)

    def add(self, tool: Tool) -> None:
        """Raises AlreadyExists for a name that is taken."""
        if tool.name in self._tools:
            raise AlreadyExists(f"there is a tool {tool.name} already: pass register(name=…)")
        self._tools[tool.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """All tools in OpenAI's form: `generate_single(conversation, tools=tools.schemas())`."""
        return [tool.schema() for tool in self]

    async def call(self, call: ToolCall) -> str:
        """The answer to one call, an unknown tool's as well."""
        if (tool := self._tools.get(call.name)) is None:
            near = did_you_mean(call.name, self._tools)
            return f"error: there is no tool {call.name[:80]}{near}; there are {', '.join(self._tools)}"
        return await tool(call.arguments)

    async def messages(self, response: str | AssistantMessage) -> list[dict[str, str]]:
        """The tool messages that answer the calls of a response, run side by side; none where it calls nothing.

        `response` is a text of `generate_single` or a message of `chat`, whose calls have ids.
        """
        if isinstance(response, AssistantMessage):
            calls, ids = response.tool_calls, [call["id"] for call in response.get("tool_calls", ())]
        else:
            # What no tool is called is answered, too: the policy reads which tools there are.
            calls, ids = list(divided_response(response, tools=self.schemas(), only_offered=False).calls), []
        answers = await asyncio.gather(*(self.call(call) for call in calls))
        made = [
            {"role": "tool", "name": call.name, "content": answer} for call, answer in zip(calls, answers, strict=True)
        ]
        return [{**message, "tool_call_id": each} for message, each in zip(made, ids, strict=True)] if ids else made


def _converted(arguments: Mapping[str, Any], to: type[msgspec.Struct]) -> dict[str, Any]:
    given = msgspec.convert(dict(arguments), to, strict=False)
    return {name: getattr(given, name) for name in given.__struct_fields__}


def _arguments_of(name: str, function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with the function's parameters. One without a type takes any JSON value."""
    hints, fields = get_type_hints(function, include_extras=True), []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidArgument(
                f"tool {name} has the parameter {parameter}: a tool's arguments are given by their names, so write "
                "each of them out"
            )
        kind = hints.get(parameter.name, Any)
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, kind, *default))
    try:
        struct = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.schema(struct)
    except TypeError as error:
        raise InvalidArgument(f"tool {name}: {str(error).splitlines()[-1]}: use types that JSON has") from error
    return struct


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The object's own schema, with its parts' definitions where it has some."""
    parts = dict(schema.get("$defs", {}))
    own = dict(parts.pop(schema["$ref"].rpartition("/")[2])) if "$ref" in schema else dict(schema)
    own.pop("title", None)
    return own | ({"$defs": parts} if parts else {})


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
