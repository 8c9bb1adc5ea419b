"""A text of the policy that remembers its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.hooks.kit.trajectory import Trajectory
from headrace.hooks.sample import Sample


class Completion(str):
    """A response's text without special tokens. Put it into `sample.response`, and into the next messages as it is."""

    trajectory: Trajectory
    """All tokens up to the end of this response."""
    seen: Sequence[Any]
    """The messages that it answers."""
    raw: str
    """The text with special tokens, in which tool calls are found."""
    whole: str
    """The text without special tokens, tool calls included."""
    tool_calls: Sequence[Any]
    """The calls that its message has beside this text."""
    parser: str | None
    """The one of SGLang's parsers that the job names for tool calls."""
    in_thought: bool
    """True where the prompt has opened a thought, so that the text begins in its midst."""
    is_open: bool
    """True where a conversation that ends with it ended before its time: a function that leaves it was cut."""

    @classmethod
    def of(
        cls,
        text: str,
        raw: str,
        trajectory: Trajectory,
        seen: Sequence[Any],
        *,
        parser: str | None = None,
        in_thought: bool = False,
    ) -> Completion:
        """Attaches the tokens to the text."""
        completion = cls(text)
        completion.raw, completion.trajectory, completion.seen = raw, trajectory, seen
        completion.whole, completion.parser, completion.in_thought = text, parser, in_thought
        completion.tool_calls, completion.is_open = (), True
        return completion

    def as_content(self, text: str, tool_calls: Sequence[Any]) -> Completion:
        """Returns the same response as a message's content that has `tool_calls` beside it."""
        content = Completion.of(
            text, self.raw, self.trajectory, self.seen, parser=self.parser, in_thought=self.in_thought
        )
        content.whole, content.tool_calls, content.is_open = str(self), copied(tool_calls), bool(tool_calls)
        return content


def build_loss_mask(sample: Sample) -> list[int] | None:
    """Returns the mask of a sample whose response is a Completion, 1 where the policy wrote; None for any other."""
    response: object = sample.response
    return [*response.trajectory.loss_mask] if isinstance(response, Completion) else None


def plain_text(value: Any) -> Any:
    """Returns a copy of messages, lists and dicts with plain text in place of completions."""
    return _mapped(value, lambda leaf: str(leaf) if isinstance(leaf, Completion) else leaf)


def copied(value: Any) -> Any:
    """Returns a copy of messages, lists and dicts that holds the same completions."""
    return _mapped(value, lambda leaf: leaf)


def _mapped(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(item, of_leaf) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, of_leaf) for key, item in value.items()}
    return of_leaf(value)
