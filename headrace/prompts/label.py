"""Converts labels to the text that scorers get, by one rule for files, submit, data sources and evaluations."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidArgument
from headrace.wire.json_text import canonical


def label_text(value: Any) -> str | None:
    """The label as text. Raises InvalidArgument.

    Text stays as it is, None is no label, anything else becomes JSON with sorted keys and no blanks. Equal values have
    equal bytes, whatever the order of their keys and wherever they came from: `true`, `[1,2.5]`.
    """
    if value is None or isinstance(value, str):
        return value
    if hasattr(value, "tolist"):  # a number, an array or a tensor of a library
        value = value.tolist()
    try:
        return canonical(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the label is neither text nor JSON: {error}: give text, or finite numbers, lists and objects of them"
        ) from error
