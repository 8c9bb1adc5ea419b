"""Finds the answer in a response."""

from __future__ import annotations

import re

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def after_thinking(response: str) -> str:
    """Returns the text behind the last `</think>`, or the whole response without one."""
    return response.rpartition("</think>")[2]


def boxed(text: str) -> str | None:
    r"""Returns the content of the last balanced `\boxed{…}` or `\fbox{…}`; None without one."""
    for start in sorted((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)), reverse=True):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position].strip()
    return None


def tagged(text: str) -> str | None:
    """Returns the content of the last `<answer>…</answer>`; None without one."""
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def last_line(text: str) -> str:
    """Returns the last line that is not blank; empty without one."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
