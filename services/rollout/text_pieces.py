"""The text of a growing response, piece by piece: each piece costs its own tokens and those of the piece before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"


class TextPieces:
    """The pieces put together are the text of all tokens.

    A token's text may depend on the token before it (a space, a character of several tokens), so each piece is what the
    tokens of two pieces decode to, less the text of the first of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before = 0
        self._sent = 0

    def next(self, tokens: Sequence[int], *, is_last: bool) -> str | None:
        """Takes all tokens so far. Returns None in the middle of a character, which more tokens complete."""
        known = self._decode(tokens[self._before : self._sent])
        text = self._decode(tokens[self._before :])
        if text.endswith(_UNFINISHED) and not is_last:
            return None
        self._before, self._sent = self._sent, len(tokens)
        return text[len(known) :]
