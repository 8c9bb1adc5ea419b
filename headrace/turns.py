"""A conversation as people read it: roles and texts, kept with a sample of several turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TURNS = "turns"
"""The key of a sample's hook_fields that holds them."""
_MAX_CHARACTERS = 200_000
_MAX_TURNS = 1_000
_CUT = " … "

Turn = dict[str, str]


def turn_of(message: Mapping[str, Any]) -> Turn:
    """A message with its content as text; calls of tools stand behind it as JSON."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    said = [_text(content)] if content else []
    said += [_text(call.get("function", call)) if isinstance(call, Mapping) else str(call) for call in calls]
    return {"role": str(message.get("role", "")), "content": "\n".join(said)}


def bounded_turns(turns: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """Turns of at most 200,000 characters together: longer texts lose their middle, and the oldest turns go first."""
    kept = [turn_of(turn) for turn in turns][-_MAX_TURNS:]
    room = _MAX_CHARACTERS // max(1, len(kept))
    if sum(len(turn["content"]) for turn in kept) <= _MAX_CHARACTERS:
        return kept
    return [{**turn, "content": _shortened(turn["content"], room)} for turn in kept]


def turns_in(hook_fields: Mapping[str, Any]) -> Sequence[Turn]:
    """The turns of a sample; none where another producer has written something else there."""
    found = hook_fields.get(TURNS)
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found):
        return ()
    return [turn_of(turn) for turn in found]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return str(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part["text"]) if "text" in part else f"<{part.get('type')}>" for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def _shortened(text: str, room: int) -> str:
    half = max(1, (room - len(_CUT)) // 2)
    return text if len(text) <= room else f"{text[:half]}{_CUT}{text[-half:]}"
