"""A session's record: every token that the policy read and wrote in it, turn by turn, as a tree.

A request whose text begins with the text on record is continued by the tokens on record, which are never tokenized
again; any other begins a branch of its own (an edited history, a template that drops thoughts, a sub-agent). Each leaf
becomes a sample. A sampled token is trained in exactly one of them: in the first that holds it.

Nothing here does input or output. `ask` may run in another thread while answers are added.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from headrace.errors import InvalidArgument
from headrace.trajectory import PolicyRange
from services.rollout.agents.messages import Message, prefix_keys
from services.rollout.engine.replies import Finish

Tokens = tuple[int, ...]


class Renderer(Protocol):
    """A tokenizer with its chat template."""

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, variables: Mapping[str, Any] = ...
    ) -> str:
        """Returns the text up to the policy's turn. Raises InvalidArgument when the template refuses it."""

    def tokens_of_rendered(self, text: str) -> Tokens:
        """Tokenizes a rendered text, special tokens in it included."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One response of the policy. Its whole text is `content`, `rest` and `end`, one behind the other."""

    tokens: Tokens
    log_probs: tuple[float, ...]
    policy_ranges: tuple[PolicyRange, ...]
    finish: Finish
    content: str
    """The text that the client is given."""
    rest: str = ""
    """The text behind it that the client is given in another form, or not at all: tool calls, a stop string."""
    end: str = ""
    """The text of the token that ended the turn."""

    @property
    def text(self) -> str:
        return f"{self.content}{self.rest}{self.end}"


@dataclass(eq=False, slots=True)
class Turn:
    """A response and what was new before it: the whole prompt of a root, else what was said since the parent."""

    parent: Turn | None
    context: Tokens
    answer: RecordedAnswer
    text: str
    """All text up to the response's end."""
    said: Sequence[Message] = ()
    """The messages of the request, and the response as the client was given it; none of a plain text."""
    children: list[Turn] = field(default_factory=list)

    def path(self) -> list[Turn]:
        """Returns the turns from the root to this one."""
        turns = [self]
        while turns[-1].parent:
            turns.append(turns[-1].parent)
        return turns[::-1]

    def tokens(self) -> list[int]:
        """Returns all tokens up to the response's end."""
        return [token for turn in self.path() for token in (*turn.context, *turn.answer.tokens)]


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
    finish: Finish
    last: RecordedAnswer
    said: Sequence[Message]
    """The conversation of its last request, with the response."""


class SessionRecord:
    """The turns of one session."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._turns: list[Turn] = []
        self._said: dict[bytes, RecordedAnswer] = {}
        """Answers by the key of all messages up to theirs."""

    def emptied(self) -> SessionRecord:
        return SessionRecord(self._renderer)

    @property
    def num_answers(self) -> int:
        return len(self._turns)

    def ask(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Ask:
        """Returns the request's tokens. `variables` of the template are for this request, beside the job's.

        Raises InvalidArgument when the chat template refuses it.
        """
        known = {
            position: answer
            for position, key in enumerate(prefix_keys(messages))
            if (answer := self._said.get(key)) and answer.rest
        }
        plain = [message.for_template() for message in messages]
        text = self._restored(plain, known, tools, variables)
        parent = None if text is None else self._longest(text)
        if text is None or parent is None:
            text, parent = self._renderer.render(plain, tools, variables), None
        return self._asked(text, parent, messages)

    def ask_text(self, text: str) -> Ask:
        """The same for a text that is no conversation."""
        return self._asked(text, self._longest(text), ())

    def add(self, ask: Ask, answer: RecordedAnswer, message: Message | None) -> None:
        """Records a response; `message` is what the client was given of it."""
        said = (*ask.messages, message) if message is not None else ()
        turn = Turn(ask.parent, ask.context, answer, ask.text + answer.text, said)
        if ask.parent:
            ask.parent.children.append(turn)
        self._turns.append(turn)
        if message is not None:
            *_, key = prefix_keys([*ask.messages, message])
            self._said.setdefault(key, answer)

    def branches(self) -> list[Branch]:
        """Returns a branch for each leaf, in the order in which they were answered."""
        trained = set[int]()
        return [_branch(turn, trained) for turn in self._turns if not turn.children]

    def _asked(self, text: str, parent: Turn | None, messages: Sequence[Message]) -> Ask:
        context = self._renderer.tokens_of_rendered(text[len(parent.text) :] if parent else text)
        before = parent.tokens() if parent else []
        return Ask((*before, *context), parent, context, text, messages)

    def _longest(self, text: str) -> Turn | None:
        """The turn with the longest text on record that this one begins with."""
        begins = (turn for turn in self._turns if text.startswith(turn.text))
        return max(begins, key=lambda turn: len(turn.text), default=None)

    def _restored(
        self,
        messages: Sequence[dict[str, Any]],
        known: Mapping[int, RecordedAnswer],
        tools: list[Any] | None,
        variables: Mapping[str, Any],
    ) -> str | None:
        """Renders with each known answer's text as it was sampled, where the client has it in another form.

        None when the template does not write one of them.
        """
        marks = {position: f"rest-{secrets.token_hex(16)}" for position in known}
        marked = [
            {"role": "assistant", "content": known[position].content + marks[position]}
            if position in known
            else message
            for position, message in enumerate(messages)
        ]
        try:
            text = self._renderer.render(marked, tools, variables)
        except InvalidArgument:
            if not marks:
                raise
            return None
        for position, mark in marks.items():
            if text.count(mark) != 1:
                return None
            text = text.replace(mark, known[position].rest)
        return text


def _branch(leaf: Turn, trained: set[int]) -> Branch:
    root, *later = leaf.path()
    response, mask, log_probs, ranges = list[int](), list[int](), list[float](), list[PolicyRange]()
    for turn in (root, *later):
        if turn is not root:
            response += turn.context
            mask += [0] * len(turn.context)
            log_probs += [0.0] * len(turn.context)
        is_new = id(turn) not in trained
        trained.add(id(turn))
        start = len(response)
        for one in turn.answer.policy_ranges:
            moved = PolicyRange(one.policy_version, start + one.start, start + one.end, masked=not is_new)
            ranges.append(moved)
        response += turn.answer.tokens
        mask += [int(is_new)] * len(turn.answer.tokens)
        log_probs += turn.answer.log_probs
    return Branch(
        prompt=root.context,
        prompt_text=root.text.removesuffix(root.answer.text),
        response=tuple(response),
        loss_mask=tuple(mask),
        log_probs=tuple(log_probs),
        policy_ranges=tuple(ranges),
        finish=leaf.answer.finish,
        last=leaf.answer,
        said=leaf.said,
    )
