"""The text of a conversation in parts that are trained and parts that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
