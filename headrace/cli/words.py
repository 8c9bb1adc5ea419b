"""Types of the commands' own arguments. argparse reports a wrong word in one line with the usage."""

from __future__ import annotations

import argparse
import math

from headrace.limits import whole_number

_MAX_COUNT = (1 << 31) - 1


def count(word: str) -> int:
    """Parses an integer of 1 or more."""
    number = whole_number(word, _MAX_COUNT)
    if not number:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is not a number from 1 to {_MAX_COUNT}")
    return number


def count_from_zero(word: str) -> int:
    """Parses an integer of 0 or more."""
    return 0 if word == "0" else count(word)


def temperature(word: str) -> float:
    """Parses a finite number of 0 or more."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e3:
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is not a number from 0 to 1000")
    return value


def text(word: str) -> str:
    """Accepts only what can be encoded as UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8") from None
    return word


_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Replaces control characters of untrusted text by pictures, so that they cannot steer the terminal."""
    return text.translate(_CONTROLS)
