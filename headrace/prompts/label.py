"""Converts labels to the text that scorers get, by one rule for files, submit, data sources and evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.wire.json_text import canonical

LABEL_IS_JSON = "label_is_json"
"""The key of `hook_json` that says so: users' functions are given the object or the list itself."""

Label = str | dict[str, Any] | list[Any] | None


def set_label(prompt: sample_pb2.Prompt, value: Any) -> None:
    """Gives the prompt its label, and notes whether that is an object or a list. Raises InvalidArgument."""
    if (text := label_text(value)) is None:
        return
    prompt.label = text
    if marked := label_mark(value):
        prompt.hook_json = canonical({**json.loads(prompt.hook_json or "{}"), **marked})


def label_mark(value: Any) -> dict[str, bool]:
    """What belongs into `hook_json` beside the text of a label: nothing for text, numbers and truth values."""
    return {LABEL_IS_JSON: True} if isinstance(_plain(value), dict | list) else {}


def label_for_hooks(text: str | None, hook_fields: Mapping[str, Any]) -> Label:
    """The label as users' functions see it: the object or list that a row holds, and all others as text."""
    if text is None or hook_fields.get(LABEL_IS_JSON) is not True:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict | list) else text


def label_as_given(value: Any) -> Label:
    """A label of a user's own code: objects and lists of plain values, all others as text. Raises InvalidArgument."""
    text = label_text(value)
    return label_for_hooks(text, label_mark(value))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def label_text(value: Any, field: str = "the label") -> str | None:
    """The label as text. Raises InvalidArgument, which calls it `field`.

    Text stays as it is, None is no label, anything else becomes JSON with sorted keys and no blanks. Equal values have
    equal bytes, whatever the order of their keys and wherever they came from: `true`, `[1,2.5]`.
    """
    if value is None or isinstance(value, str):
        return value
    try:
        return canonical(_plain(value))  # also of a number, an array or a tensor of a library
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{field} is neither text nor JSON: {error}: give text, or finite numbers, lists and objects of them"
        ) from error
