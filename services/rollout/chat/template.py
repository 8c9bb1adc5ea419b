"""A chat template: the variables that it reads, and which of its text each message became."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from jinja2 import Environment, Template, meta, nodes

from headrace.errors import ConfigError, InvalidArgument
from headrace.limits import did_you_mean

# A chat template that says which of its text each message became.
# Every loop of the template over messages is given marks: one in front of each message, one behind the loop. A mark
# holds a random number, so nothing that a message says can look like one.

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text: what stands before the messages, what each became by its position, what follows them."""

    prefix: str
    written: MutableMapping[int, str]
    suffix: str

    @property
    def text(self) -> str:
        """The whole text."""
        return f"{self.prefix}{''.join(self.written.values())}{self.suffix}"


class TracedTemplate:
    """A tokenizer's chat template, for tools or without."""

    def __init__(
        self, tokenizer: Any, *, with_tools: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds

        source = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
        # Transformers' own environment, so that the text is the one that engines see.
        environment: Environment = _compile_jinja_template(source).environment
        self._nonce = secrets.token_hex(16)
        self._mark = re.compile(f"\ue000{self._nonce}:(\\d+):(\\d+|end)\ue001")
        tree = environment.parse(source)
        _mark_loops(tree)
        code = cast(Any, environment.compile(tree))
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self._variables: Mapping[str, Any] = {**tokenizer.special_tokens_map, **variables}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        thinking: bool | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """`thinking`: on or off, where a template knows it. Raises InvalidArgument when the template refuses them."""
        messages = [dict(message) for message in messages]  # an object of its own each: by that it is known
        positions = {id(message): position for position, message in enumerate(messages)}

        def mark(loop: int, message: object) -> str:
            position = positions.get(id(message))
            return "" if position is None else f"\ue000{self._nonce}:{loop}:{position}\ue001"

        def mark_end(loop: int) -> str:
            return f"\ue000{self._nonce}:{loop}:end\ue001"

        try:
            marked = self._template.render(
                **{**self._variables, **_thinking(thinking)},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                headrace_mark=mark,
                headrace_mark_end=mark_end,
            )
        except Exception as error:  # a template is code of the checkpoint's author: it may raise anything
            raise InvalidArgument(f"the chat template refused it: {error}", field="prompt.messages") from error
        return self._rendered(marked)

    def _rendered(self, marked: str) -> Rendered:
        pieces = self._mark.split(marked)
        text, loops = pieces[0], dict[int, _Loop]()
        for number, position, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            loops.setdefault(int(number), _Loop()).reach(None if position == "end" else int(position), len(text))
            text += piece
        regions = max((loop.regions for loop in loops.values()), key=_num_characters, default={})
        ends = [place for region in regions.values() for place in region] or [len(text)]
        written = {position: text[start:end] for position, (start, end) in regions.items()}
        return Rendered(text[: min(ends)], written, text[max(ends) :])


def _thinking(thinking: bool | None) -> Mapping[str, bool]:
    return {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}


class _Loop:
    """The regions that one loop of the template wrote. A loop that visits a message again only searches."""

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self._open: tuple[int, int] | None = None

    def reach(self, position: int | None, characters: int) -> None:
        """Notes that the loop is at the message at `position` (None: at its end), after so much of the text."""
        if self._open is not None:
            message, start = self._open
            self.regions[message] = (start, characters if message not in self.regions else start)
        self._open = None if position is None else (position, characters)


def _num_characters(regions: Mapping[int, tuple[int, int]]) -> int:
    return sum(end - start for start, end in regions.values())


def _mark_loops(tree: nodes.Node) -> None:
    """Puts `headrace_mark(n, x)` first into the body of loop n over x, and `headrace_mark_end(n)` behind the loop."""
    for number, (block, loop) in enumerate(list(_loops(tree))):
        if isinstance(loop.target, nodes.Name):
            target = nodes.Name(loop.target.name, "load")
            loop.body.insert(0, _output("headrace_mark", [nodes.Const(number), target]))
            block.insert(block.index(loop) + 1, _output("headrace_mark_end", [nodes.Const(number)]))


def _loops(node: nodes.Node) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    """Yields every loop with the block of statements that it stands in."""
    for _, value in node.iter_fields():
        if isinstance(value, list):
            for child in value:
                if isinstance(child, nodes.For):
                    yield value, child
    for child in node.iter_child_nodes():
        yield from _loops(child)


def _output(function: str, arguments: list[nodes.Expr]) -> nodes.Output:
    return nodes.Output([nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)])


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the text."""

    text: str
    trained: bool


class Segments:
    """Takes the text in order. A turn without a closing mark of its own is closed by one that follows it at once."""

    def __init__(self, closings: Sequence[str]) -> None:
        self._closings = closings
        self._parts: list[Segment] = []
        self._missing: str | None = None

    def add(self, text: str) -> None:
        """Adds text that is not trained."""
        if self._missing is not None and text:
            following = next((closing for closing in self._closings if text.startswith(closing)), "")
            self._missing = None
            self._put(following, trained=True)
            text = text.removeprefix(following)
        self._put(text, trained=False)

    def train(self, text: str, closing: str | None = None) -> None:
        """Adds an assistant's text. `closing` is added behind it if the conversation ends without a closing mark."""
        self._put(text, trained=True)
        self._missing = closing

    def finish(self) -> list[Segment]:
        """Returns all segments, of which trained and untrained ones alternate."""
        if self._missing is not None:
            self._put(self._missing, trained=True)
        return self._parts

    def _put(self, text: str, *, trained: bool) -> None:
        if not text:
            return
        if self._parts and self._parts[-1].trained == trained:
            text = self._parts.pop().text + text
        self._parts.append(Segment(text, trained))


_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FIELD = "data.apply_chat_template_kwargs"


def require_read(readable: Collection[str], names: Iterable[str], source: str = "apply_chat_template_kwargs") -> None:
    """Raises ConfigError for a name that the template does not read, or that headrace gives itself.

    `source`: the flag or parameter that has the names.
    """
    for name in names:
        if name in _GIVEN:
            raise ConfigError(f"{source}: {name} comes from the prompt: leave it out", field=_FIELD)
        if name not in readable:
            known = f"it reads {', '.join(sorted(readable))}" if readable else "it reads none of its own"
            raise ConfigError(
                f"{source}: the chat template never reads {name}; {known}{did_you_mean(name, readable)}", field=_FIELD
            )


def readable(tokenizer: Any) -> frozenset[str]:
    """Returns the template's own variables. Raises ConfigError where the tokenizer has no template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds

    found = set[str]()
    without, some = None, [dict[str, Any]()]
    for tools in (without, some):
        try:
            source = tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            message = "apply_chat_template_kwargs: the checkpoint's tokenizer has no chat template: leave it out"
            raise ConfigError(message, field=_FIELD) from error
        environment = _compile_jinja_template(source).environment
        tree = environment.parse(source)
        assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}  # in a branch, maybe
        tests = (test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined"))
        asked = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}  # assigned where it is absent
        found |= (meta.find_undeclared_variables(tree) - assigned | asked) - set(environment.globals)
    return frozenset(found - _GIVEN - set(tokenizer.special_tokens_map))
