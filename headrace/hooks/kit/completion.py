"""A text of the policy that remembers its tokens."""

from __future__ import annotations

from collections.abc import Sequence
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

    @classmethod
    def of(cls, text: str, raw: str, trajectory: Trajectory, seen: Sequence[Any]) -> Completion:
        """Attaches the tokens to the text."""
        completion = cls(text)
        completion.raw, completion.trajectory, completion.seen = raw, trajectory, seen
        return completion


def build_loss_mask(sample: Sample) -> list[int] | None:
    """Returns the mask of a sample whose response is a Completion, 1 where the policy wrote; None for any other."""
    response: object = sample.response
    return [*response.trajectory.loss_mask] if isinstance(response, Completion) else None


def plain_text(value: Any) -> Any:
    """Returns a copy of messages, lists and dicts with plain text in place of completions."""
    if isinstance(value, Completion):
        return str(value)
    if isinstance(value, list):
        return [plain_text(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_text(item) for key, item in value.items()}
    return value
