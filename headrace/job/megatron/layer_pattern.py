"""Parses which layers have experts, as Megatron's script writes it: `1`, `[0,1,1]`, `[0]*1+[1]*45`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BeforeValidator

from headrace.job.schema.parts.literal import literal

_TERM = re.compile(r"\[([0-9](?:,[0-9])*)\](?:\*([0-9]{1,3}))?")
_MAX_CHARACTERS = 4096


def _from_text(value: Any) -> Any:
    """Adds repeated lists up to one list; any other value is left to the field's type."""
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return value
    terms = [_TERM.fullmatch(term) for term in value.replace(" ", "").split("+")]
    layers: list[int] = []
    for term in terms:
        if term is None:
            return literal(value)
        layers += [int(digit) for digit in term[1].split(",")] * int(term[2] or 1)
    return layers


LayerPattern = BeforeValidator(_from_text)
