"""Parses words whose type is not declared: a number, a list, or text."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BeforeValidator


def literal(word: str) -> Any:
    """A number, true, false, null or other JSON if the word is one; else the word itself."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):  # no JSON, or a number or nesting beyond what Python reads
        return {"True": True, "False": False, "None": None}.get(word, word)


def _from_json(value: Any) -> Any:
    return literal(value) if isinstance(value, str) else value


FromJson = BeforeValidator(_from_json)
"""Reads a union's value: `--moe-layer-freq 1` is a number, `--moe-layer-freq "[0, 1]"` is a list."""
