"""Types of the commands' own arguments: argparse says what is wrong with a word, in one line and with its usage."""

from __future__ import annotations

import argparse
import math

_MAX_COUNT = (1 << 31) - 1


def count(word: str) -> int:
    """A number of things: 1 or more."""
    if not word.isascii() or not word.isdigit() or len(word) > 10 or not 1 <= int(word) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is not a number from 1 to {_MAX_COUNT}")
    return int(word)


def temperature(word: str) -> float:
    """0 or more, finite."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e3:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is not a number from 0 to 1000")
    return value


def text(word: str) -> str:
    """Characters that travel."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it holds bytes that are no UTF-8") from None
    return word


_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Text of a model or of a peer for a terminal: control characters as their pictures, so they steer nothing."""
    return text.translate(_CONTROLS)
