"""A session: every token that the policy read and wrote in it, turn by turn, as a tree.

Agents at the OpenAI endpoint record their requests here, and so do generate and rollout functions that use the kit.
A request whose text begins with the text on record is continued by the tokens on record, which are never tokenized
again; any other begins a branch of its own (an edited history, a template that drops thoughts, a sub-agent). Each leaf
becomes a sample. A sampled token is trained in exactly one of them: in the first that holds it.

A function makes one sample of its whole conversation. So its messages are continued behind the newest response that
they hold as it was given (`ask_behind`), even where the template would write that response otherwise by now.

Nothing here does input or output. `ask` may run in another thread while answers are added.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.trajectory import PolicyRange, Status

_BLANK_THOUGHT = re.compile(r"\s*(<think>\s*)?(</think>\s*)?")
"""What some templates write before a response of which they are told no thought."""

Tokens = tuple[int, ...]
Message = Mapping[str, Any]
"""A message as chat templates take it: content as text, arguments of tool calls as objects."""


class Renderer(Protocol):
    """A tokenizer with its chat template."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = ...,
        first: int = 0,
    ) -> str:
        """Returns the text up to the policy's turn.

        Raises InvalidArgument when the template refuses it, or leaves out a message from the one at `first` on.
        """

    def tokens_of_rendered(self, text: str) -> Tokens:
        """Tokenizes a rendered text, special tokens in it included."""


ALL_TOKENS = np.empty(0, np.int32)
"""The set of a token that was sampled from all, or not sampled."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One response of the policy. Its whole text is `content`, `rest` and `end`, one behind the other."""

    tokens: Tokens
    log_probs: tuple[float, ...]
    policy_ranges: tuple[PolicyRange, ...]
    status: Status
    content: str
    """The text that the client is given."""
    rest: str = ""
    """The text behind it that the client is given in another form, or not at all: tool calls, a stop string."""
    end: str = ""
    """The text of the token that ended the turn."""
    opened: str = ""
    """The end of the prompt that opened a thought, where the client is given the thought in another form: it stands
    before `rest` then."""
    spoken: str = ""
    """The text without special tokens, where that is what the client is given."""
    meta_infos: Sequence[Mapping[str, Any]] = ()
    """What the engine said of it, where a user's function has asked the engine."""
    is_cut: bool = False
    """A limit on turns or on context has ended the session."""
    kept: Sequence[NDArray[np.int32]] | None = None
    """The token ids that each token was sampled from, where the engine said them."""

    @property
    def text(self) -> str:
        return f"{self.content}{self.rest}{self.end}"

    @property
    def plain(self) -> str:
        """The text without the token that ended the turn."""
        return self.spoken or f"{self.content}{self.rest}"


@dataclass(eq=False, slots=True)
class Turn:
    """A response and what was new before it: the whole prompt of a root, else what was said since the parent."""

    parent: Turn | None
    context: Tokens
    answer: RecordedAnswer
    text: str
    """All text up to the response's end."""
    said: Sequence[Message] = ()
    """The messages of the request, and the response as the client was given it. A text that continues an earlier
    response is told as messages too; the first response to a text has none."""
    children: list[Turn] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)
    """Of all messages up to the response, in each form in which the client has it."""

    def path(self) -> list[Turn]:
        """Returns the turns from the root to this one."""
        turns = [self]
        while turns[-1].parent:
            turns.append(turns[-1].parent)
        return turns[::-1]

    def tokens(self) -> list[int]:
        """Returns all tokens up to the response's end."""
        return [token for turn in self.path() for token in (*turn.context, *turn.answer.tokens)]

    def beginnings(self) -> Iterator[str]:
        """Yields the texts whose continuation goes on behind this turn."""
        yield self.text
        if self.answer.spoken:
            yield f"{self.text.removesuffix(self.answer.text)}{self.answer.spoken}"

    def said_behind(self, text: str, response: str) -> Sequence[Message]:
        """The conversation up to this turn as messages, for a later turn that continues the text."""
        before = self.said or (
            {"role": "user", "content": self.text.removesuffix(self.answer.text)},
            {"role": "assistant", "content": self.answer.plain},
        )
        begins = max(filter(text.startswith, self.beginnings()), key=len)
        since = {"role": "user", "content": text.removeprefix(begins)}
        return (*before, since, {"role": "assistant", "content": response})

    def branch(self) -> Branch:
        """Returns the way to this turn, all of whose sampled tokens are trained."""
        return _branch(self, set())


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as tokens, and where in the record its answers belong."""

    tokens: Tokens
    parent: Turn | None
    context: Tokens
    text: str
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """A way from the root to a leaf: R response tokens behind the prompt's, with a mask and log-probs of length R."""

    prompt: Tokens
    prompt_text: str
    response: Tokens
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_ranges: tuple[PolicyRange, ...]
    last: RecordedAnswer
    said: Sequence[Message]
    """The conversation of its last request, with the response."""
    kept: Sequence[NDArray[np.int32]] | None = None
    """The token ids that each response token was sampled from; of all where its set is empty."""


class Completion(str):
    """A response's text without special tokens. Put it into `sample.response`, and into the next messages as it is."""

    turn: Turn
    whole: str
    """The text without special tokens, tool calls included."""
    parser: str | None
    """The one of SGLang's parsers that the job names for tool calls."""
    in_thought: bool
    """True where the prompt has opened a thought, so that the text begins in its midst."""
    is_open: bool
    """True where a conversation that ends with it ended before its time: a function that leaves it was cut."""

    @classmethod
    def of(cls, text: str, turn: Turn, *, parser: str | None = None, in_thought: bool = False) -> Completion:
        completion = cls(text)
        completion.turn, completion.whole = turn, text
        completion.parser, completion.in_thought, completion.is_open = parser, in_thought, True
        return completion

    def as_content(self, text: str, *, is_open: bool) -> Completion:
        """Returns the same response as a message's content, whose tool calls stand beside it."""
        content = Completion.of(text, self.turn, parser=self.parser, in_thought=self.in_thought)
        content.whole, content.is_open = str(self), is_open
        return content

    @property
    def raw(self) -> str:
        """The text with special tokens, in which tool calls are found."""
        return self.turn.answer.text


class SessionRecord:
    """The turns of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._said: dict[bytes, Turn] = {}
        """Turns by the key of all messages up to their response."""

    def emptied(self) -> SessionRecord:
        return SessionRecord(self._renderer)

    @property
    def num_answers(self) -> int:
        return len(self._turns)

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Ask:
        """Returns the request's tokens. `variables` of the template are for this request, beside the job's.

        Raises InvalidArgument when the chat template refuses it.
        """
        known = {
            position: turn
            for position, key in enumerate(prefix_keys(messages))
            if (turn := self._said.get(key)) and turn.answer.rest
        }
        text = self._restored(messages, known, tools, variables)
        found = None if text is None else self._longest(text)
        if text is None or found is None:
            text, found = self._renderer.render(_copied(messages), _listed(tools), variables), None
        return self._asked(text, found, messages)

    def ask_behind(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Ask | None:
        """Returns the tokens of the newest response that the messages hold as it was given, and of what was said since.

        A mark stands in for the response, so that it is neither rendered nor tokenized again. None where there is no
        such response. Raises InvalidArgument where the template refuses what was said since, or leaves it out.
        """
        found = self._newest(messages)
        if found is None:
            return None
        position, turn = found
        mark = f"response-{secrets.token_hex(8)}"
        marked = _copied(messages)
        marked[position] = {key: value for key, value in marked[position].items() if key != "tool_calls"}
        marked[position]["content"] = mark
        rendered = self._renderer.render(marked, _listed(tools), first=position)
        _, has_mark, behind = rendered.rpartition(mark)
        if not has_mark:
            raise InvalidArgument(
                "the chat template leaves the policy's earlier response out, so its tokens cannot be continued: append "
                "it with the role assistant"
            )
        before, context = turn.tokens(), self._renderer.tokens_of_rendered(behind)
        if context and context[0] == before[-1]:  # the response has ended its turn itself
            context, behind = context[1:], behind.removeprefix(turn.answer.end)
        return Ask((*before, *context), turn, context, turn.text + behind, messages)

    def ask_text(self, text: str, begin: Callable[[str], Tokens] | None = None) -> Ask:
        """The same for a text that is no conversation; `begin` tokenizes one that continues nothing."""
        found = self._longest(text)
        if found is None and begin is not None:
            tokens = begin(text)
            return Ask(tokens, None, tokens, text)
        return self._asked(text, found, ())

    def add(self, ask: Ask, answer: RecordedAnswer, message: Message | None) -> Turn:
        """Records a response; `message` is what the client was given of it."""
        if message is not None:
            said: Sequence[Message] = (*ask.messages, message)
        else:
            said = ask.parent.said_behind(ask.text, answer.plain) if ask.parent else ()
        turn = Turn(ask.parent, ask.context, answer, ask.text + answer.text, said)
        if ask.parent:
            ask.parent.children.append(turn)
        self._turns.append(turn)
        if message is not None:
            self.know(turn, said)
        return turn

    def know(self, turn: Turn, said: Sequence[Message]) -> None:
        """The client has the response in these messages, as their last."""
        *_, key = prefix_keys(said)
        turn.keys.add(key)
        self._said.setdefault(key, turn)

    def branches(self) -> list[Branch]:
        """Returns a branch for each leaf, in the order in which they were answered."""
        trained = set[int]()
        return [_branch(turn, trained) for turn in self._turns if not turn.children]

    def _asked(self, text: str, found: tuple[Turn, str] | None, messages: Sequence[Message]) -> Ask:
        parent, begins = found or (None, "")
        context = self._renderer.tokens_of_rendered(text[len(begins) :])
        before = parent.tokens() if parent else []
        return Ask((*before, *context), parent, context, text, messages)

    def _longest(self, text: str) -> tuple[Turn, str] | None:
        """The turn with the longest text on record that this one begins with, and that text."""
        begins = ((turn, one) for turn in self._turns for one in turn.beginnings() if text.startswith(one))
        return max(begins, key=lambda found: len(found[1]), default=None)

    def _newest(self, messages: Sequence[Message]) -> tuple[int, Turn] | None:
        """The position of the newest response that is as it was given, with all that was said before it."""
        for position, key in reversed(list(enumerate(prefix_keys(messages)))):
            content = messages[position].get("content")
            if isinstance(content, Completion) and key in content.turn.keys:
                return position, content.turn  # of several that read alike, the function's own
            if turn := self._said.get(key):
                return position, turn
        return None

    def _restored(
        self,
        messages: Sequence[Message],
        known: Mapping[int, Turn],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> str | None:
        """Renders with each known answer's text as it was sampled, where the client has it in another form.

        None when the template does not write one of them.
        """
        marks = {position: f"rest-{secrets.token_hex(16)}" for position in known}
        marked = [
            {"role": "assistant", "content": known[position].answer.content + marks[position]}
            if position in known
            else dict(message)
            for position, message in enumerate(messages)
        ]
        try:
            text = self._renderer.render(marked, _listed(tools), variables)
        except InvalidArgument:
            if not marks:
                raise
            return None
        for position, mark in marks.items():
            if text.count(mark) != 1:
                return None
            text = _put_back(text, mark, known[position])
        return text


def _put_back(text: str, mark: str, turn: Turn) -> str:
    """The rendered text with the rest of a response in place of its mark."""
    before, _, behind = text.partition(mark)
    answer = turn.answer
    prompt = turn.text.removesuffix(answer.text)
    header = prompt.removesuffix(answer.opened)
    restored = f"{answer.opened}{answer.rest}"
    if not answer.content and restored.lstrip().startswith("<think>") and before.startswith(header):
        before = header if _BLANK_THOUGHT.fullmatch(before, len(header)) else before  # it brings a thought of its own
    return f"{before}{restored}{behind}"


def prefix_keys(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yields a key for each message, which stands for it and all before it."""
    running = hashlib.sha256()
    for message in messages:
        running.update(_key(message))
        yield running.digest()


def _key(message: Message) -> bytes:
    """Equal for messages that say the same; ids of tool calls, which some clients renew, do not count."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [(function.get("name"), function.get("arguments")) for function in functions]
    said = [
        message.get("role"),
        message.get("content") or "",
        message.get("name"),
        message.get("reasoning_content"),
        calls,
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()


def _copied(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _listed(tools: Sequence[Any] | None) -> list[Any] | None:
    return None if tools is None else list(tools)


def _branch(leaf: Turn, trained: set[int]) -> Branch:
    root, *later = leaf.path()
    response, mask, log_probs, ranges = list[int](), list[int](), list[float](), list[PolicyRange]()
    kept = list[NDArray[np.int32]]()
    for turn in (root, *later):
        if turn is not root:
            response += turn.context
            mask += [0] * len(turn.context)
            log_probs += [0.0] * len(turn.context)
            kept += [ALL_TOKENS] * len(turn.context)
        is_new = id(turn) not in trained
        trained.add(id(turn))
        start = len(response)
        for one in turn.answer.policy_ranges:
            moved = PolicyRange(one.policy_version, start + one.start, start + one.end, masked=not is_new)
            ranges.append(moved)
        response += turn.answer.tokens
        mask += [int(is_new)] * len(turn.answer.tokens)
        log_probs += turn.answer.log_probs
        kept += turn.answer.kept or [ALL_TOKENS] * len(turn.answer.tokens)
    return Branch(
        prompt=root.context,
        prompt_text=root.text.removesuffix(root.answer.text),
        response=tuple(response),
        loss_mask=tuple(mask),
        log_probs=tuple(log_probs),
        policy_ranges=tuple(ranges),
        last=leaf.answer,
        said=leaf.said,
        kept=None if all(turn.answer.kept is None for turn in (root, *later)) else kept,
    )
