"""Finds the answer in a response, and the right answers in a label."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from headrace.errors import InvalidArgument
from headrace.limits import canonical

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans("。、【】", ".,[]")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def after_thinking(response: str) -> str:
    """Returns the text behind the last `</think>`: all of a response without thoughts, nothing of unfinished ones."""
    _, end, answer = response.rpartition("</think>")
    return "" if not end and response.lstrip().startswith("<think>") else answer


def with_ascii_signs(text: str) -> str:
    """Writes the wide letters, digits and signs of Chinese and Japanese text as the ASCII ones."""
    return text.translate(_WIDE)


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


def right_answers(scorer: str, label: str, *, repeats_json: bool = False) -> Sequence[str]:
    """Returns the texts of which each is a right answer.

    A label that is no text in its file arrives as JSON without blanks. Of verl's objects the `ground_truth` counts, and
    the `target` in it. Of a list with texts each entry is right; a list of several numbers is one answer. With
    `repeats_json` a response may have to repeat a text that is JSON. Raises InvalidArgument for other objects, which no
    answer could match.
    """
    if not label.startswith(("{", "[")):
        return [label]
    try:
        value = json.loads(label)
        is_text = canonical(value) != label
    except (ValueError, RecursionError):
        return [label]
    if is_text and (isinstance(value, list) or (repeats_json and not value.keys() & {"ground_truth", "target"})):
        return [label]
    if right := _right(scorer, value):
        return right
    raise InvalidArgument(f"scorer {scorer}: the label {label!r:.80} holds no answer: write one, or leave the row out")


def final_part(solution: str) -> str:
    """Returns what follows the last `####`, as in GSM8K's labels, which are whole solutions; or the whole text."""
    return solution.rpartition("####")[2].strip()


def example(scorer: str, label: str) -> str:
    """Returns an answer that the label should match; the label itself where it holds none."""
    try:
        return final_part(right_answers(scorer, label, repeats_json=True)[0])
    except InvalidArgument:
        return label


def _right(scorer: str, value: Any) -> Sequence[str]:
    match value:
        case {"ground_truth": inner} | {"target": inner} if inner is not None:
            return _right(scorer, inner)
        case dict():
            raise InvalidArgument(
                f"scorer {scorer} compares with text, and the label is an object with the keys "
                f"{', '.join(map(str, value)):.80}: name the key of the answer, as in --label-key "
                f"KEY.{next(iter(value), 'ground_truth')}, or score with --custom-rm-path"
            )
        case list() if any(isinstance(entry, str) for entry in value) or len(value) == 1:
            return [text for entry in value if entry is not None for text in _right(scorer, entry)]
        case list() if any(isinstance(entry, dict) for entry in value):
            raise InvalidArgument(
                f"scorer {scorer} compares with text, and the label is a list of objects: write the answer, or a list "
                "of answers, as text"
            )
        case str():
            return [value]
        case _:
            return [canonical(value)]


def last_line(text: str) -> str:
    """Returns the last line that is not blank; empty without one."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
