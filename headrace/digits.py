"""Reads numbers that people and other machines wrote."""

from __future__ import annotations


def whole_number(text: str, most: int) -> int | None:
    """Returns what ASCII digits mean, from 0 to `most`; None for any other text.

    `int` takes digits of other scripts, fails at some that `str.isdigit` calls digits, and at more than 4,300.
    """
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if number <= most else None
