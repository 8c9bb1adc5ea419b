"""The texts of single tokens, as a person reads them beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.models.tokenizer.tokenizer import TOKENIZER_JSON

_BYTE = "<0x"
_SPACE = "▁"


class TokenTexts:
    """Reads a model folder's tokenizer.json by the package tokenizers; nothing of the folder is run."""

    def __init__(self, model: Path) -> None:
        self._file = model / TOKENIZER_JSON

    @property
    def error(self) -> str | None:
        """Why there are no texts."""
        return self._loaded if isinstance(self._loaded, str) else None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """One text for each token, with bytes that are no whole character in hexadecimal; None without a tokenizer."""
        return None if isinstance(self._loaded, str) else [self._loaded(token) for token in ids]

    @cached_property
    def _loaded(self) -> Callable[[int], str] | str:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return (
                "the package tokenizers is not installed here, so tokens are shown as numbers: pip install tokenizers"
            )
        if not self._file.is_file():
            return f"{self._file} is not there, so tokens are shown as numbers: run headrace view where the model is"
        try:
            tokenizer = Tokenizer.from_file(str(self._file))
            decoder = json.loads(self._file.read_bytes()).get("decoder")
        except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exception for a damaged file
            return f"{self._file} cannot be read, so tokens are shown as numbers: {error}"
        added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        return _texts(tokenizer.id_to_token, added, "ByteLevel" in _kinds(decoder))


def _texts(
    piece_of: Callable[[int], str | None], added: Mapping[int, str], is_byte_level: bool
) -> Callable[[int], str]:
    def text(token: int) -> str:
        piece = piece_of(token)
        if piece is None or token in added:
            return added.get(token, f"<{token}>")
        if is_byte_level and all(character in _BYTES for character in piece):
            return _of_bytes(bytes(_BYTES[character] for character in piece))
        if piece.startswith(_BYTE):
            return _of_bytes(bytes([int(piece[len(_BYTE) : -1], 16)]))
        return piece.replace(_SPACE, " ")

    return text


def _of_bytes(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_kinds(each) for each in decoder.get("decoders") or ()))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable characters stand for their bytes, and those from U+0100 on for the others, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
